"""One denoise step, of the events in the stream of an answer (docs/canvases.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """Of one canvas; all lists have one entry per canvas position."""

    block: int  # which canvas of the answer, from 0
    number: int  # 1-based, starts again with every canvas
    best_guess: list[int]
    accepted: list[bool]
    entropy_nats: float  # mean over the canvas
    finished: bool  # the best guess is the block

    @classmethod
    def from_event(cls, canvas: Mapping[str, Any]) -> "Step":
        return cls(
            block=canvas["block"],
            number=canvas["step"],
            best_guess=canvas["tokens"],
            accepted=[bool(flag) for flag in canvas["accepted"]],
            entropy_nats=canvas["mean_entropy"],
            finished=canvas["finished"],
        )


def finished_blocks(steps: Sequence[Step]) -> list[list[int]]:
    """The tokens of every finished canvas of one request, in order."""
    return [step.best_guess for step in steps if step.finished]
