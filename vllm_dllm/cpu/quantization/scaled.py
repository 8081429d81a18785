"""Quantised matrices as kernels multiply them: first the values, then their scales."""

from typing import NamedTuple

import torch


class Scaled(NamedTuple):
    """The matrix `values * scale`. The values have few bits: fp32 holds products of two of them
    exactly, bf16 the values themselves."""

    values: torch.Tensor  # [n, K] fp32 or bf16
    scale: torch.Tensor  # fp32, [n, 1], or [] for all rows

    def __getitem__(self, rows: torch.Tensor | slice) -> "Scaled":
        return Scaled(self.values[rows], self.scale[rows] if self.scale.dim() else self.scale)

    def for_model(self, dtype: torch.dtype) -> "Scaled":
        """Returns what `multiply` takes in a model of this type. Processors that know bf16 multiply
        it fastest: sums are fp32 in both, and a model in bf16 rounds the result to it anyway."""
        is_bf16 = dtype == torch.bfloat16
        return self._replace(values=self.values.to(dtype)) if is_bf16 else self


def multiply(x: Scaled, weight: Scaled) -> torch.Tensor:
    """x @ weight.T, [rows of x, rows of weight] fp32. In bf16 the sums are rounded to it before
    they are scaled."""
    scale = weight.scale.T if weight.scale.dim() else weight.scale
    return (x.values @ weight.values.T).float().mul_(x.scale * scale)
