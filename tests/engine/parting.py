"""Where a generation of ours parts from the reference's, and whether rounding decides there.

A step decides by comparing: the best guess by the largest logit, acceptance by a sum of entropies,
a candidate by where its draw falls, the end by a mean entropy. Where the two sides of a comparison
are equal but for the last digits, either outcome is right, and what comes after differs with it. So
two generations are compared to the first step where they part; there, the reference's own numbers
must be that close.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests import tolerances


class Decisions(NamedTuple):
    """Of one step."""

    best_guess: list[int]  # [C]
    accepted: list[int]  # [C] 0 or 1
    canvas: list[int]  # [C], what the next forward reads
    finished: bool


class Grounds(NamedTuple):
    """What the reference decided it by."""

    log_probs: torch.Tensor  # [C, V] float64, at the step's temperature
    draw: torch.Tensor  # [C] float64 in [0, 1), of the candidates


class Settings(NamedTuple):
    entropy_bound: float
    confidence_threshold: float
    lowest_temperature: float


def first_parting(ours: Sequence[Decisions], theirs: Sequence[Decisions]) -> int | None:
    """The step; None: there is none."""
    for step, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return step
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def is_decided_by_rounding(
    ours: Decisions, theirs: Decisions, grounds: Grounds, settings: Settings
) -> bool:
    """Whether all that differs in a step may."""
    near = tolerances.DECISION / settings.lowest_temperature
    log_probs, draw = grounds
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1)
    order = entropy.argsort()
    sums = torch.zeros_like(entropy)
    sums[order] = entropy[order].cumsum(0) - entropy[order]  # of what is accepted before
    cumulative = probs.cumsum(-1)
    for p, (guess, accepted, token) in enumerate(
        zip(ours.best_guess, ours.accepted, ours.canvas, strict=True)
    ):
        their_guess, their_accepted, their_token = (
            theirs.best_guess[p], theirs.accepted[p], theirs.canvas[p],
        )  # fmt: skip
        if guess != their_guess and log_probs[p, their_guess] - log_probs[p, guess] > near:
            return False
        if accepted != their_accepted:
            if abs(sums[p] - settings.entropy_bound) > near * len(entropy):
                return False
        elif token != their_token and not (ours.finished or theirs.finished):
            first, last = sorted((token, their_token))
            if not accepted or (cumulative[p, first:last] - draw[p]).abs().max() > near:
                return False
    if ours.finished != theirs.finished:
        return bool((entropy.mean() - settings.confidence_threshold).abs() <= near)
    return True
