"""A server process lives as long as its block, and its end is told with its log."""

import sys
from pathlib import Path

import pytest

from tests.processes import is_running, wait_for
from vllm_dllm.errors import ServerError
from vllm_dllm.tools import server_process


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of someone's real server stays out; what is given is added."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    script = "import os; print(os.environ.get('VLLM_API_KEY'), os.environ['ADDED'])"
    log = tmp_path / "server.log"
    with server_process.Server([sys.executable, "-c", script], 1, log, {"ADDED": "1"}):
        wait_for(lambda: log.read_text().endswith("\n"))
    assert log.read_text() == "None 1\n"


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    lines = ["(EngineCore) ValueError: no such file", *(f"frame {i}" for i in range(30)), "the end"]
    script = f"import sys; print({chr(10).join(lines)!r}); sys.exit(3)"
    failing = server_process.Server([sys.executable, "-c", script], 1, tmp_path / "server.log")
    with (
        failing,
        pytest.raises(ServerError, match=r"ended \(3\).*server\.log") as ended,
    ):
        failing.wait_until_ready(lambda seconds: None)
    shown = str(ended.value).splitlines()[2:]
    assert shown == [lines[0], "[...]", *lines[-12:]]


@pytest.mark.slow
def test_stopping_reaches_the_engine_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.3)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10**6)"
    parent = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(child.pid, flush=True); child.wait()"
    )
    log = tmp_path / "server.log"
    with server_process.Server([sys.executable, "-c", parent], 1, log) as stubborn:
        wait_for(lambda: log.read_text().endswith("\n"))
        pids = [int(log.read_text()), stubborn._process.pid]
        assert all(map(is_running, pids))
    wait_for(lambda: not any(map(is_running, pids)))
