"""What all commands that write a folder share: they write all of it or nothing, and go on."""

from pathlib import Path
from typing import Any

import pytest

from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
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
