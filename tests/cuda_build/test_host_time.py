"""What the host does for a step, beside stock vLLM: it must not be late for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cuda_build import host_time
from tests.cuda_build.machine import H100, Host

NUMBERS = (1, 8, 16, 32)  # of requests
MOST = 12
"""Launches outside of graphs in a step whose requests are those of the step before: 11, of which 8
are the runner's."""
STOCK = Host((9, 0), settings=(("VLLM_PLUGINS", ""),))


def test_fewer_launches_than_stock(
    on_host: Callable[..., Any], folder: Path, host_times: list[str]
) -> None:
    """Times are printed, and launches compared: a stand-in for an operation takes many times as
    long as the operation, so times say how many there are, and little else."""
    ours, stock = (
        on_host(host, host_time.measure, folder=folder, numbers=NUMBERS) for host in (H100, STOCK)
    )
    host_times += host_time.table(ours, stock)
    for number in NUMBERS:
        assert ours[number]["launches"] <= MOST < 0.7 * stock[number]["launches"]
