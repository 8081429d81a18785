"""Reads the steps of a request from the trace file (`vllm_dllm.step.trace`) while it grows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One denoise step of one canvas; all lists have one entry per canvas position."""

    request_id: str
    number: int  # 1-based, starts again with every canvas
    best_guess: list[int]
    accepted: list[bool]
    canvas: list[int]  # what the next step reads: candidates where accepted, noise elsewhere
    entropy_nats: float  # mean over the canvas
    finished: bool  # the best guess is committed next

    @classmethod
    def from_line(cls, line: bytes) -> "Step":
        fields = json.loads(line)
        return cls(
            request_id=fields["request_id"],
            number=fields["step"],
            best_guess=fields["tokens"],
            accepted=[bool(flag) for flag in fields["accepted"]],
            canvas=fields["canvas"],
            entropy_nats=fields["entropy"],
            finished=fields["finished"],
        )


class StepReader:
    """Reads the steps added since the last call; a line still being written waits for the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Step]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # the server has not opened it yet
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [Step.from_line(line) for line in data[:end].splitlines()]


def committed_blocks(steps: Sequence[Step]) -> list[list[int]]:
    """The tokens of every finished canvas of one request, in order."""
    return [step.best_guess for step in steps if step.finished]
