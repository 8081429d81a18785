"""Statistics of each canvas position's distribution: best guess, candidate, entropy."""

from typing import NamedTuple

import torch


class RowStats(NamedTuple):
    """Statistics of each row's distribution."""

    best_guess: torch.Tensor  # [rows] int64, argmax
    candidate: torch.Tensor  # [rows] int64, one draw from softmax(logits)
    entropy_nats: torch.Tensor  # [rows] fp32
    best_logprob: torch.Tensor  # [rows] fp32, log-probability of the best guess


def row_stats(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled; MASKED_LOGIT, never -inf
    uniform: torch.Tensor,  # [rows] float in [0, 1)
) -> tuple[RowStats, torch.Tensor]:
    """Returns statistics of every row's distribution, and softmax(logits) [rows, V] fp32. The
    candidate is drawn by inverting the cumulative distribution at `uniform`. This takes one random
    number per position, where Gumbel-max takes one per token of the vocabulary."""
    log_probs = logits.log_softmax(dim=-1)
    probs = log_probs.exp()
    best_guess = argmax(logits)
    best_logprob = log_probs.gather(-1, best_guess[:, None]).squeeze(-1)
    stats = RowStats(
        best_guess=best_guess,
        candidate=sample_by_inversion(probs, uniform),
        entropy_nats=log_probs.mul_(probs).sum(dim=-1).neg_(),
        best_logprob=best_logprob,
    )
    return stats, probs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the index of the first largest entry along the last axis, int64. On CPUs it uses
    NumPy, whose argmax is vectorised, as torch's is not."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def sample_by_inversion(
    probs: torch.Tensor,  # [rows, V] fp32
    uniform: torch.Tensor,  # [rows] float in [0, 1)
) -> torch.Tensor:
    """Returns the first token [rows] int64 whose cumulative probability exceeds `uniform`. A token
    of probability 0 is never returned, even with rounding: it leaves the sum as it is, and the draw
    stays below the total. That also holds for PyTorch's sums of several rows on GPUs. Its sum of a
    single row there may grow at such a token, and differ from one rank to the next."""
    summed = probs.expand(2, -1) if probs.is_cuda and len(probs) == 1 else probs
    cumulative = summed.cumsum(dim=-1)[: len(probs)]
    # A factor of 1 would let a draw round up to the total; this one always rounds to less.
    draw = uniform.to(cumulative.dtype)[:, None] * (cumulative[:, -1:] * (1 - 2.0**-24))
    found = torch.searchsorted(cumulative, draw, right=True).squeeze(-1)
    # A row with a NaN has no answer, but must not point outside the vocabulary.
    return found.clamp_(max=probs.shape[-1] - 1)


def sum_dtype(terms: torch.Tensor) -> torch.dtype:
    """Returns the dtype to sum fp32 `terms` in. It is float64 on GPUs, where the order of additions
    depends on the number of canvases: float64 keeps that out of the result."""
    return torch.float64 if terms.is_cuda else terms.dtype
