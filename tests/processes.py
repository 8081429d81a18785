"""Waiting for processes, and asking whether they still run."""

import time
from collections.abc import Callable
from pathlib import Path

HANGS_S = 1200
"""Who waits longer hangs. No test measures time: a machine may be as slow or busy as it likes."""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], what: str = "what is waited for") -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.02)
