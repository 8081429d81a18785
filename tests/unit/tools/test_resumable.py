"""What commands share: the command line, a server for the length of a block, folders of which they
write all or nothing, and go on, and output that cannot be written."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.processes import is_running, wait_for
from vllm_dllm import cli
from vllm_dllm.cli import main
from vllm_dllm.errors import InputError, ServerError
from vllm_dllm.tools import server_process
from vllm_dllm.tools.commands import COMMANDS
from vllm_dllm.tools.resumable import RUN_FILE, Run, check_out
from vllm_dllm.tools.terminal import wait_on_console

IDENTITY: dict[str, Any] = {"seed": 1, "sizes": (2, 3)}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "out", IDENTITY, "seed", ("working", "never made"))


@pytest.fixture
def other(run: Run) -> Run:
    """A run with the same OUT."""
    return replace(run, identity=IDENTITY | {"seed": 2})


def test_nothing_is_there_until_all_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    check_out(run.out)
    assert not run.is_finished()
    run.start()
    (run.partial / "result").write_text("x")
    (run.partial / "working").mkdir()
    check_out(run.out)
    assert not run.out.exists() and not run.is_finished()
    run.start()  # as what goes on does
    run.finish()
    assert [file.name for file in run.out.iterdir()] == ["result"] and not run.partial.exists()
    assert capsys.readouterr().out == f"Wrote {run.out}\n"
    for look in (lambda: check_out(run.out), run.is_finished):
        with pytest.raises(InputError, match="out exists already: remove it or name another"):
            look()


def test_another_run_does_not_go_on(run: Run, other: Run) -> None:
    run.start()
    with pytest.raises(
        InputError, match=r"out\.partial is left from a run with another seed: remo"
    ):
        other.is_finished()
    assert (run.partial / RUN_FILE).exists()


@pytest.mark.parametrize("left", [[], [RUN_FILE + ".tmp"]])
def test_a_run_that_had_not_yet_begun(other: Run, left: list[str]) -> None:
    """Anybody's: it was stopped before it said which it is."""
    other.partial.mkdir()
    for name in left:
        (other.partial / name).touch()
    assert not other.is_finished()


def test_a_run_that_was_stopped_while_it_cleaned_up(run: Run, other: Run) -> None:
    """Finished by itself, and by no other."""
    run.start()
    (run.partial / "working").touch()
    run.partial.rename(run.out)
    with pytest.raises(InputError, match="out exists already"):
        other.is_finished()
    assert {file.name for file in run.out.iterdir()} == {"working", RUN_FILE}
    check_out(run.out)
    assert run.is_finished()
    assert not list(run.out.iterdir())


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of someone's real server stays out; what is given is added."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    script = "import os; print(os.environ.get('VLLM_API_KEY'), os.environ['ADDED'])"
    log = tmp_path / "server.log"
    with server_process.Server([sys.executable, "-c", script], 1, log, {"ADDED": "1"}):
        wait_for(lambda: log.read_text().endswith("\n"))
    assert log.read_text() == "None 1\n"


@pytest.mark.parametrize("is_ignored", [False, True], ids=["", "nohup"])
def test_a_closed_terminal_ends_the_command(tmp_path: Path, is_ignored: bool) -> None:
    """But not under nohup, which has it ignore the signal."""
    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with (
            nullcontext() if is_ignored else pytest.raises(SystemExit, match="129"),
            server_process.Server([sys.executable, "-c", ""], 1, tmp_path / "server.log"),
        ):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_wait_for_a_server_takes_one_line(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("first line\n" + "last line " * 30)

    def wait_until_ready(show_wait: Callable[[float], None]) -> float:
        show_wait(7.0)
        return 8.0

    server: Any = SimpleNamespace(log=tmp_path / "server.log", wait_until_ready=wait_until_ready)
    screen = io.StringIO()
    console = Console(file=screen, width=40, force_terminal=True, _environ={})
    assert wait_on_console(server, console) == 8.0
    shown = [line for line in screen.getvalue().splitlines() if "line" in line]
    assert len(shown) == 1 and "7 s  last line" in shown[0] and shown[0].endswith("…")


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    lines = ["(EngineCore) ValueError: no such file", *(f"frame {i}" for i in range(30)), "the end"]
    script = f"import sys; print({chr(10).join(lines)!r}); sys.exit(3)"
    failing = server_process.Server([sys.executable, "-c", script], 1, tmp_path / "server.log")
    with failing, pytest.raises(ServerError, match=r"ended \(3\).*server\.log") as ended:
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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    name, version = capsys.readouterr().out.split()
    assert name == "vllm-dllm" and version[0].isdigit()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_each_default_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*name.split(), "--help"])
    options = capsys.readouterr().out.split("\n  -")
    assert all(option.count("default: ") <= 1 for option in options)


TRAIN = "drafter train --target x -o y"
PLAN = "plan x --gpu h200"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            f"{TRAIN} --target-layers a,b",
            "--target-layers: expected numbers such as 1,3,5, got a,b",
        ),
        (f"{TRAIN} --seed -1", "--seed: expected a whole number from 0 on, of at most 18 digits"),
        (f"{TRAIN} --seed {10**23}", f"of at most 18 digits, got {10**23}"),
        (
            f'{PLAN} --limit-mm-per-prompt {{"image"',
            'expected JSON like {"image": 0}, got {"image"',
        ),
        (
            "eval x --serve-options='a",
            "--serve-options: No closing quotation in 'a: expected a shell",
        ),
    ],
    ids=["layers", "negative seed", "huge seed", "image limit", "quotation"],
)
def test_says_what_it_expects(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert message in capsys.readouterr().err


def run_into(stdout: int, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status, and what is written to standard error."""
    result = subprocess.run(
        [sys.executable, "-m", "vllm_dllm", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    os.close(stdout)
    return result.returncode, result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written(unbuffered: str) -> None:
    nobody_reads, pipe = os.pipe()
    os.close(nobody_reads)
    assert run_into(pipe, "checkpoint", PYTHONUNBUFFERED=unbuffered) == (1, "")
    status, error = run_into(
        os.open("/dev/full", os.O_WRONLY), "checkpoint", PYTHONUNBUFFERED=unbuffered
    )
    assert (status, error.count("\n")) == (1, 1) and "No space left on device" in error


def test_an_encoding_that_lacks_characters() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    assert run_into(nowhere, "drafter", "train", "--help", PYTHONIOENCODING="ascii") == (0, "")
