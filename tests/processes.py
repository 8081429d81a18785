"""Running processes to their end, waiting for them, and asking whether they still run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def run(
    *command: object, variables: Mapping[str, str] = {}, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """A program that has ended, with what it said. `variables`: of its environment, beside ours."""
    words, environment = list(map(str, command)), os.environ | variables
    return subprocess.run(
        words, **{"env": environment, "capture_output": True, "text": True, **options}
    )


def output_of(*command: object, **options: Any) -> str:
    """What a program prints that ends well; of Python, if its first argument is no program."""
    if str(command[0]).startswith("-") or str(command[0]).endswith(".py"):
        command = (sys.executable, *command)
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
