"""What commands share: the command line, a server for the length of a block, and folders of
which they write all or nothing, and go on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_running, wait_for
from vllm_dllm import cli
from vllm_dllm.errors import InputError, ServerError
from vllm_dllm.tools import resumable, server_process
from vllm_dllm.tools.commands import COMMANDS, DRAFTER_COMMANDS
from vllm_dllm.tools.resumable import RUN_FILE, finish_run, is_finished, is_resumed, start_run

RUN: dict[str, Any] = {"seed": 1, "sizes": (2, 3)}
OTHER = RUN | {"seed": 2}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_nothing_is_there_until_all_is(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = resumable.partial_folder(out)
    assert not is_finished(out, RUN) and not is_resumed(partial, RUN, "seed")
    start_run(partial, RUN)
    (partial / "result").write_text("x")
    (partial / "working").mkdir()
    assert not out.exists() and is_resumed(partial, RUN, "seed")
    start_run(partial, RUN)  # as what goes on does
    finish_run(partial, out, ["working", "never made"])
    assert [file.name for file in out.iterdir()] == ["result"] and not partial.exists()
    assert capsys.readouterr().out == f"Wrote {out}\n"
    for look in (lambda: resumable.partial_folder(out), lambda: is_finished(out, RUN)):
        with pytest.raises(InputError, match="out exists already: remove it or name another"):
            look()


def test_another_run_does_not_go_on(out: Path) -> None:
    partial = resumable.partial_folder(out)
    start_run(partial, RUN)
    with pytest.raises(
        InputError, match=r"out\.partial is left from a run with another seed: remo"
    ):
        is_resumed(partial, OTHER, "seed")
    assert (partial / RUN_FILE).exists()


@pytest.mark.parametrize("left", [[], [RUN_FILE + ".tmp"]])
def test_a_run_that_had_not_yet_begun(out: Path, left: list[str]) -> None:
    """Anybody's: it was stopped before it said which it is."""
    partial = resumable.partial_folder(out)
    partial.mkdir()
    for name in left:
        (partial / name).touch()
    assert not is_resumed(partial, OTHER, "seed")


def test_a_run_that_was_stopped_while_it_cleaned_up(out: Path) -> None:
    """Finished by itself, and by no other."""
    start_run(out, RUN)
    (out / "working").touch()
    with pytest.raises(InputError, match="out exists already"):
        is_finished(out, OTHER, ["working"])
    assert {file.name for file in out.iterdir()} == {"working", RUN_FILE}
    assert resumable.partial_folder(out) and is_finished(out, RUN, ["working"])
    assert not list(out.iterdir())


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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    name, version = capsys.readouterr().out.split()
    assert name == "vllm-dllm" and version[0].isdigit()


@pytest.mark.parametrize(
    "words", [*([n] for n in COMMANDS), *(["drafter", n] for n in DRAFTER_COMMANDS)]
)
def test_help_names_each_default_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    options = capsys.readouterr().out.split("\n  -")
    assert all(option.count("default: ") <= 1 for option in options)
