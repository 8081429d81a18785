"""When a canvas is finished: its best guess stands still and the model is sure of it."""

import torch

NO_TOKEN = -1
"""Fills the history of a fresh canvas. No token id equals it, so a history that is not full yet
never counts as stable."""


def is_stable(
    best_guess: torch.Tensor,  # [n, C] int64
    history: torch.Tensor,  # [n, stability_threshold, C] int64, earlier best guesses
    valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
) -> torch.Tensor:
    """[n] bool: the best guess equals each of the `stability_threshold` guesses before it."""
    same = history == best_guess[:, None, :]
    if valid is not None:
        same |= ~valid[:, None, :]
    return same.flatten(1).all(dim=-1)


def is_confident(
    entropy_nats: torch.Tensor,  # [n, C] fp32
    valid: torch.Tensor | None,  # [n, C] bool; None: all
    confidence_threshold: float,  # nats
) -> torch.Tensor:
    """[n] bool: the mean entropy over the canvas' own positions is below the threshold."""
    if valid is None:
        return entropy_nats.mean(dim=-1) < confidence_threshold
    total = torch.where(valid, entropy_nats, 0.0).sum(dim=-1)
    return total / valid.sum(dim=-1).clamp(min=1) < confidence_threshold


def push_history(
    history: torch.Tensor,  # [n, stability_threshold, C]
    best_guess: torch.Tensor,  # [n, C]
) -> torch.Tensor:
    """The history one step later: the oldest guess leaves, `best_guess` comes last."""
    if history.shape[1] == 0:
        return history
    return torch.cat((history[:, 1:], best_guess[:, None, :]), dim=1)
