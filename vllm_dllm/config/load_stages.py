"""How much sooner canvases may be finished while a server is busy."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge, Le

from vllm_dllm.config.checks import Count, Integer, Number, settings
from vllm_dllm.config.denoise import MOST_NATS, MOST_STEPS


@settings
class LoadStage:
    """When a step has `canvases` or more, those of requests that allow it are finished by these
    thresholds, where they are looser than the request's."""

    canvases: Count
    confidence_threshold: Annotated[Number, Ge(0), Le(MOST_NATS)] = 0.0
    """Nats; 0 loosens nothing."""
    stability_threshold: Annotated[Integer, Ge(0), Le(MOST_STEPS)] = MOST_STEPS
    """Steps; `MOST_STEPS` loosens nothing."""


def check_order(stages: Sequence[LoadStage]) -> None:
    """Raises ValueError for a stage that does not follow the one before it, or is tighter."""
    for earlier, later in pairwise(stages):
        if (
            later.canvases <= earlier.canvases
            or later.confidence_threshold < earlier.confidence_threshold
            or later.stability_threshold > earlier.stability_threshold
        ):
            raise ValueError(
                f"load_stages must be ordered: each with more canvases than the one before, and "
                f"no tighter threshold, got {later} after {earlier}."
            )
