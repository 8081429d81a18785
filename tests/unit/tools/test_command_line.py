"""Values that the command line itself refuses: it says what it expects, and names no function.
Output that nobody reads, that does not fit, or that has characters which its encoding lacks."""

import os
import subprocess
import sys

import pytest

from vllm_dllm.cli import main

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
