"""Checks scales as they are read: a quantised model must not be served with a bad one."""

import torch

KINDS = {
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
}
"""The last parts of the names of scales in checkpoints."""


def complaint(kind: str, tensor: torch.Tensor) -> str | None:
    """Says what is wrong with the values of a tensor of this kind: all scales must be positive
    numbers, those of groups (e4m3) too. None for tensors that are not scales, and on the meta
    device."""
    if kind not in KINDS or tensor.is_meta or not tensor.is_floating_point():
        return None
    values = tensor.float()
    fit = (values > 0) & values.isfinite()
    if fit.all():
        return None
    return f"it must only hold positive numbers, got {values[~fit][0].item()}"
