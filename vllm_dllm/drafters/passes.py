"""Chooses which positions a drafter reveals in each step, if it unmasks its block in several steps.

One step for the whole block is the default, and what a DFlash drafter is trained for: several steps
took τ from 6.18 to about 2.5 in the TPU port, whose drafter had never seen predicted tokens in a
block.

The schedules are from an article (AitherOS, "DFlash", 2026). Its formula for the cosine, which is
also MaskGIT's (arXiv:2202.04200, section 3.2), reveals [1, 4, 5, 6] of 16 positions in 4 steps, and
not [6, 5, 3, 2] as the article says. We keep the formula.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: math.cos(t * math.pi / 2),
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: math.sqrt(1 - t),
}
"""Schedule -> function of the share of steps done: the share of the block that is still masked."""


def reveal_counts(num_masked: int, num_steps: int = 1, schedule: str = "cosine") -> list[int]:
    """Returns the number of positions that each of `num_steps` steps reveals: at least one each,
    and `num_masked` in all. Raises ValueError if there are more steps than positions."""
    if not 1 <= num_steps <= num_masked:
        raise ValueError(
            f"expected 1 to {num_masked} steps for {num_masked} masked positions, got {num_steps}"
        )
    remaining = [num_masked]
    for step in range(1, num_steps + 1):
        rounded = round(num_masked * SCHEDULES[schedule](step / num_steps))
        remaining.append(min(max(rounded, num_steps - step), remaining[-1] - 1))
    return [before - after for before, after in pairwise(remaining)]


def choose_revealed(
    confidence: Tensor,  # [num_reqs, block] floats, in the token guessed at each position
    masked: Tensor,  # [num_reqs, block] bool, positions that may be revealed
    count: int,  # positions to reveal of each request
) -> Tensor:
    """Returns [num_reqs, block] bool: the `count` masked positions of each request with the highest
    confidence. Among equal positions the first are chosen. All masked positions are chosen if there
    are no more than `count`."""
    lowest = torch.finfo(confidence.dtype).min
    ranked = torch.where(masked, confidence.clamp_min(lowest), -math.inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(masked.shape[1], device=masked.device) < count
    chosen = torch.zeros_like(masked).scatter(1, order, first.expand_as(order))
    return chosen & masked
