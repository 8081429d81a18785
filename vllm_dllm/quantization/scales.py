"""Scales that a quantised model must not be served with, found as they are read."""

import torch

KINDS = {
    "weight_scale",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
}
"""Last parts of their names in checkpoints."""


def complaint(kind: str, tensor: torch.Tensor) -> str | None:
    """What is wrong with the values of a tensor of this kind: scales are positive numbers, those of
    groups (e4m3) too. None for tensors that are no scales, and on the meta device."""
    if kind not in KINDS or tensor.is_meta or not tensor.is_floating_point():
        return None
    values = tensor.float()
    fit = (values > 0) & values.isfinite()
    if fit.all():
        return None
    return f"it must hold positive numbers only, got {values[~fit][0].item()}"
