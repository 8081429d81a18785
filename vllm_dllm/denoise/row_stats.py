"""What a step needs to know of each canvas position's distribution, and nothing vocabulary-wide."""

from typing import NamedTuple

import torch


class RowStats(NamedTuple):
    best_guess: torch.Tensor  # [rows] int64, argmax
    candidate: torch.Tensor  # [rows] int64, one draw from softmax(logits)
    entropy_nats: torch.Tensor  # [rows] fp32


def row_stats(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled
    probs: torch.Tensor,  # [rows, V] fp32, softmax(logits)
    uniform: torch.Tensor,  # [rows] float in [0, 1)
) -> RowStats:
    """Statistics of every row's distribution.

    The candidate is drawn by inverting the cumulative distribution at `uniform`: one random number
    a position, where Gumbel-max needs one for every token of the vocabulary.
    """
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    # As torch.distributions.Categorical.entropy, the reference's: a filtered token has
    # log-probability -inf and must add 0, not nan.
    entropy = -(log_probs.clamp(min=torch.finfo(log_probs.dtype).min) * probs).sum(dim=-1)
    return RowStats(
        best_guess=_argmax(logits),
        candidate=sample_by_inversion(probs, uniform),
        entropy_nats=entropy,
    )


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first largest entry [rows] int64. On a CPU NumPy's is vectorised, torch's is not."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


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
