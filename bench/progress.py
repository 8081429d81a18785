"""What a long bench has found so far, in a file: stopped, it goes on from there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Progress:
    """Outcomes of numbered tasks. The file has a line of JSON for the setting, then one for each
    outcome."""

    def __init__(self, setting: Mapping[str, Any], total: int, path: Path | None = None) -> None:
        """Reads what `path` has; without it, nothing is kept.

        Raises:
            ValueError: it has outcomes of another setting.
        """
        self._total, self._path = total, path
        self.outcomes: list[dict[str, Any]] = []
        self._numbers: set[int] = set()
        if path is None:
            return
        lines = _whole_lines(path)
        as_read = json.loads(json.dumps(setting))
        if not lines:
            self._write(as_read, "w")
            return
        differs = [key for key in as_read if json.loads(lines[0]).get(key) != as_read[key]]
        if differs:
            raise ValueError(f"{path} is of other {', '.join(differs)}. Remove it to begin anew")
        for line in lines[1:]:
            self._take(json.loads(line))
        # The run before may have been stopped in the middle of a line.
        path.write_text("".join(line + "\n" for line in lines))

    def has(self, number: int) -> bool:
        return number in self._numbers

    def add(self, outcome: dict[str, Any]) -> None:
        """`outcome` has the task's "number"."""
        self._take(outcome)
        if self._path is not None:
            self._write(outcome, "a")
        if len(self.outcomes) % 500 == 0:
            print(f"{len(self.outcomes)} of {self._total}", flush=True)

    def _take(self, outcome: dict[str, Any]) -> None:
        self.outcomes.append(outcome)
        self._numbers.add(outcome["number"])

    def _write(self, value: Mapping[str, Any], mode: str) -> None:
        assert self._path is not None
        with self._path.open(mode) as file:
            file.write(json.dumps(value) + "\n")


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
