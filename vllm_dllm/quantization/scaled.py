"""Quantised matrices as kernels multiply them: first the values, then their scales."""

from typing import NamedTuple

import torch


class Scaled(NamedTuple):
    """The matrix `values * scale`. The values have few bits, so products of two are exact in fp32
    and only their sum is rounded."""

    values: torch.Tensor  # [n, K] fp32
    scale: torch.Tensor  # fp32, [n, 1], or [] for all rows

    def __getitem__(self, rows: torch.Tensor) -> "Scaled":
        return Scaled(self.values[rows], self.scale[rows] if self.scale.dim() else self.scale)


def multiply(x: Scaled, weight: Scaled) -> torch.Tensor:
    """x @ weight.T, [rows of x, rows of weight] fp32."""
    scale = weight.scale.T if weight.scale.dim() else weight.scale
    return (x.values @ weight.values.T).mul_(x.scale * scale)
