"""Values that the command line itself refuses: it says what it expects, and names no function."""

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
