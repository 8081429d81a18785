"""What a step needs to know of each canvas position's distribution, and nothing vocabulary-wide."""

from typing import NamedTuple

import torch


class RowStats(NamedTuple):
    best_guess: torch.Tensor  # [rows] int64, argmax
    candidate: torch.Tensor  # [rows] int64, one draw from softmax(logits)
    entropy_nats: torch.Tensor  # [rows] fp32


def row_stats(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled
    uniform: torch.Tensor,  # [rows] float in [0, 1)
) -> RowStats:
    """Statistics of `softmax(logits)` for every row.

    The candidate is drawn by inverting the cumulative distribution at `uniform`: one random number
    a position, where Gumbel-max needs one for every token of the vocabulary.
    """
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    probs = torch.softmax(logits, dim=-1)
    # As torch.distributions.Categorical.entropy, the reference's: a filtered token has
    # log-probability -inf and must add 0, not nan.
    entropy = -(log_probs.clamp(min=torch.finfo(log_probs.dtype).min) * probs).sum(dim=-1)
    return RowStats(
        best_guess=logits.argmax(dim=-1),
        candidate=sample_by_inversion(probs, uniform),
        entropy_nats=entropy,
    )


def sample_by_inversion(
    probs: torch.Tensor,  # [rows, V] fp32
    uniform: torch.Tensor,  # [rows] float in [0, 1)
) -> torch.Tensor:
    """The first token [rows] int64 whose cumulative probability exceeds `uniform`.

    A token of probability 0 is never returned, rounding included.
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    draw = (uniform[:, None] * total).to(cumulative.dtype)
    token = torch.searchsorted(cumulative, draw, right=True)
    last_possible = torch.searchsorted(cumulative, total)
    return torch.minimum(token, last_possible).squeeze(-1)
