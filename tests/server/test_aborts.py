"""Clients that leave take nothing with them and leave nothing behind."""

from tests.processes import wait_for
from tests.server.aborts import seeded_answers, storm
from tests.server.conftest import Server
from tests.server.open_requests import LONG, OpenRequest, metric, wait_until_unfinished


def test_a_storm_of_aborts(server: Server) -> None:
    before = seeded_answers(server)
    storm(server, count=24, at_once=16)
    wait_until_unfinished(server, 0)
    assert metric(server, "kv_cache_usage_perc") == 0
    assert seeded_answers(server) == before
    # All places are free: as many as there are run at once.
    open_ones = [OpenRequest(server, LONG | {"stream": True, "seed": i}) for i in range(32)]
    wait_for(lambda: metric(server, "num_requests_running") == 32)
    for one in open_ones:
        one.leave(0)
    wait_until_unfinished(server, 0)
