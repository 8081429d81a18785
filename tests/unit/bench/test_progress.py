"""A bench that was stopped goes on where it was."""

from pathlib import Path

import pytest

from bench.progress import Progress


def test_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    first = Progress({"seed": 1}, 3, path)
    first.add({"number": 0, "of": "noise"})
    first.add({"number": 2, "of": "noise"})
    with path.open("a") as file:
        file.write('{"number": 1, "o')  # stopped here
    second = Progress({"seed": 1}, 3, path)
    assert [second.has(number) for number in range(3)] == [True, False, True]
    second.add({"number": 1, "of": "trained"})
    third = Progress({"seed": 1}, 3, path)
    assert sorted(outcome["number"] for outcome in third.outcomes) == [0, 1, 2]


def test_outcomes_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    Progress({"seed": 1, "answers": 3}, 3, path).add({"number": 0})
    with pytest.raises(ValueError, match="other seed"):
        Progress({"seed": 2, "answers": 3}, 3, path)
