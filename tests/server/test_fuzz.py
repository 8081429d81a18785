"""A short form of `tests/faults/test_fuzz.py`: odd requests, always the same ones."""

from tests.faults.fuzz import DIFFUSION, Fuzz
from tests.server.conftest import CHECKPOINT, Server


def test_odd_requests(server: Server) -> None:
    fuzz = Fuzz(server.port, CHECKPOINT, DIFFUSION)
    before = fuzz.plain_answers()
    fuzz.run(96)
    assert fuzz.broken == []
    assert fuzz.statuses[200] > 30 and fuzz.statuses[400] > 10
    assert fuzz.plain_answers() == before
