"""How much sooner canvases may be finished while a server is busy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_dllm.config.checks import check_count
from vllm_dllm.config.denoise import MOST_NATS, MOST_STEPS


@dataclass(frozen=True)
class LoadStage:
    """When a step has `canvases` or more, those of requests that allow it are finished by these
    thresholds, where they are looser than the request's."""

    canvases: int
    confidence_threshold: float = 0.0
    """Nats; 0 loosens nothing."""
    stability_threshold: int = MOST_STEPS
    """Steps; `MOST_STEPS` loosens nothing."""

    def __post_init__(self) -> None:
        check_count("load_stages: canvases", self.canvases)
        nats, steps = self.confidence_threshold, self.stability_threshold
        if (
            isinstance(nats, bool)
            or not isinstance(nats, (int, float))
            or not 0 <= nats <= MOST_NATS
        ):
            raise ValueError(
                f"load_stages: confidence_threshold must be a number from 0 to {MOST_NATS:g}, got "
                f"{nats!r}."
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
            raise ValueError(
                f"load_stages: stability_threshold must be an integer from 0 to {MOST_STEPS}, got "
                f"{steps!r}."
            )


def load_stages(section: Any) -> tuple[LoadStage, ...]:
    """Reads the `load_stages` entry of the extension's settings: a list of objects, the stage of
    fewest canvases first.

    Raises:
        ValueError: a key is unknown, a value out of range, or a stage tighter than one before it;
            names it and what is expected.
    """
    known = set(LoadStage.__dataclass_fields__)
    if not isinstance(section, Sequence) or not all(
        isinstance(entry, Mapping) and "canvases" in entry and set(entry) <= known
        for entry in section
    ):
        raise ValueError(
            f"load_stages must be a list of objects with the key canvases, and of "
            f"{sorted(known - {'canvases'})} those that change, got {section!r}."
        )
    stages = tuple(LoadStage(**entry) for entry in section)
    for earlier, later in pairwise(stages):
        if (
            later.canvases <= earlier.canvases
            or later.confidence_threshold < earlier.confidence_threshold
            or later.stability_threshold > earlier.stability_threshold
        ):
            raise ValueError(
                f"load_stages must be ordered: each with more canvases than the one before, and "
                f"no tighter threshold, got {section!r}."
            )
    return stages
