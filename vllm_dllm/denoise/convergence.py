"""When a canvas is finished: its best guess no longer changes and the model is sure of it."""

import torch

from vllm_dllm.denoise.row_stats import sum_dtype

NO_TOKEN = -1
"""The best guess before the first step: equal to no token id, so the first step repeats nothing."""

AT_REST = 4
"""Steps without a change of the best guess after which a canvas with a grammar is finished, even if
the model is unsure, as at a high temperature. The grammar leaves few tokens to change to."""


def times_repeated(
    best_guess: torch.Tensor,  # [n, C] int64
    earlier: torch.Tensor,  # [n, C] int64, the last step's best guess
    times: torch.Tensor,  # [n] int64, how often `earlier` had been repeated
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
) -> torch.Tensor:
    """Returns [n] int64: for how many consecutive steps the best guess has not changed."""
    same = best_guess == earlier
    if valid is not None:
        same |= ~valid
    return (times + 1) * same.all(dim=-1)


def is_confident(
    entropy_nats: torch.Tensor,  # [n, C] fp32
    valid: torch.Tensor | None,  # [n, C] bool; None: all
    confidence_threshold: float | torch.Tensor,  # nats, for all canvases or [n]
) -> torch.Tensor:
    """Returns [n] bool: whether the mean entropy over the canvas' positions is below the
    threshold."""
    dtype = sum_dtype(entropy_nats)
    if valid is None:
        mean = entropy_nats.sum(dim=-1, dtype=dtype) / entropy_nats.shape[-1]
    else:
        total = torch.where(valid, entropy_nats, 0.0).sum(dim=-1, dtype=dtype)
        mean = total / valid.sum(dim=-1).clamp(min=1)
    return mean.float() < confidence_threshold


def up_to_first_stop(
    best_guess: torch.Tensor,  # [n, C] int64
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
    stop_tokens: torch.Tensor,  # [n, K] int64, tokens that end an answer; unused places: < 0
) -> torch.Tensor:
    """Returns [n, C] bool: the valid positions up to and including the first stop token. Later
    positions are not part of the answer, so a canvas need not wait for them."""
    stops = (best_guess[..., None] == stop_tokens[:, None, :]).any(dim=-1)
    if valid is not None:
        stops &= valid
    before = stops.cumsum(dim=-1) - stops.long()  # stop tokens before each position
    first = before == 0
    return first if valid is None else first & valid
