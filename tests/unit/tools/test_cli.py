"""The command line itself: its version, and mistakes that are one line."""

import pytest

from vllm_dllm import cli
from vllm_dllm.tools.commands import COMMANDS, DRAFTER_COMMANDS


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
