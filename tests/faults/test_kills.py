"""When a process of a server is killed or told to stop, no client hangs and no process stays."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import HANGS_S, wait_for
from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, start, start_serving, stop
from tests.server.open_requests import LONG, OpenRequest, wait_until_unfinished
from tests.server.process_trees import engine_of, fork_server_of, gone, worker_of
from tests.server.test_ending import LAST_RESORT

OPTIONS = (*UNCOMPILED, "--max-num-seqs", "16")
Started = tuple[subprocess.Popen[bytes], Server]


@contextmanager
def started_with(folder: Path, drain_seconds: int) -> Iterator[Started]:
    settings = {"drain_seconds": drain_seconds}
    process, server = start_serving(CHECKPOINT, folder, *OPTIONS, settings=settings)
    try:
        yield process, server
    finally:
        stop(process)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    with started_with(tmp_path, drain_seconds=2) as it:
        yield it


def open_some(server: Server) -> list[OpenRequest]:
    some = [OpenRequest(server, LONG | {"stream": i < 8, "seed": i}) for i in range(12)]
    wait_until_unfinished(server, 12)
    return some


def check_told(some: list[OpenRequest]) -> None:
    """Each got an error, or the end of its connection, and none an answer that looks whole."""
    for one in some:
        one.wait()
        if one.error is None and one.status == 200:
            assert '"finish_reason":"' not in one.text
            assert '"error"' in one.text or "[DONE]" not in one.text
        elif one.error is None:
            assert one.status in (500, 503), one.text


@pytest.mark.parametrize(
    "victim", [worker_of, engine_of, fork_server_of, lambda leader: leader.pid]
)
def test_kill_9(started: Started, victim: Callable[[subprocess.Popen[bytes]], int]) -> None:
    process, server = started
    some = open_some(server)
    os.kill(victim(process), signal.SIGKILL)
    check_told(some)
    wait_for(lambda: gone(process))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes(started: Started, number: int) -> None:
    """As Ctrl-C sends it, and a service manager."""
    process, server = started
    some = open_some(server)
    os.killpg(process.pid, number)
    check_told(some)
    process.wait(HANGS_S)
    wait_for(lambda: gone(process))
    assert LAST_RESORT not in server.log.read_text()


def test_what_finishes_in_time_is_answered(tmp_path: Path) -> None:
    with started_with(tmp_path, drain_seconds=HANGS_S) as (process, server):
        some = [OpenRequest(server, LONG | {"seed": i}) for i in range(3)]
        wait_until_unfinished(server, 3)
        os.killpg(process.pid, signal.SIGINT)
        for one in some:
            assert one.wait().status == 200, one.text
            assert '"finish_reason":"length"' in one.text
        process.wait(HANGS_S)
        wait_for(lambda: gone(process))
        assert LAST_RESORT not in server.log.read_text()


MOMENTS = (
    "Using FlashAttention|non-default args|Resolved architecture",
    "Initializing a V1 LLM engine",
    "Loading safetensors|Loading weights|Starting to load model",
    "init engine|Warming up|GPU KV cache size|CPU KV cache|# GPU blocks",
    "Starting vLLM server",
    "Application startup complete",
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start(tmp_path: Path, moment: str, number: int) -> None:
    log = tmp_path / "log"
    process, _ = start(CHECKPOINT, log, *OPTIONS)
    try:
        wait_for(lambda: bool(re.search(moment, log.read_text())) or process.poll() is not None)
        assert process.poll() is None, log.read_text()[-2000:]
        os.kill(process.pid, number)
        process.wait(HANGS_S)
        wait_for(lambda: gone(process))
        assert LAST_RESORT not in log.read_text()
    finally:
        stop(process)
