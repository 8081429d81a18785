"""The elementwise parts of the training forward, each a function that a compiler can fuse.

On a CPU these cost more than the matmuls when run operation by operation, so training compiles
them; the plain functions are the definition of right.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # rms_norm_eps of the config


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return normed if weight is None else normed * weight


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm, then rotary embedding; x [B, length, heads, head_dim], cos [length, 1, head_dim]"""
    x = rms_norm(x, weight)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def add_norm(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return residual + rms_norm(x, weight)


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def merge_branches(
    residual: Tensor,
    dense: Tensor,
    sparse: Tensor,
    dense_weight: Tensor,
    sparse_weight: Tensor,
    out_weight: Tensor,
    scalar: Tensor,  # [1]
) -> Tensor:
    """`scalar` times residual plus the normed sum of the normed dense and expert branches."""
    both = rms_norm(dense, dense_weight) + rms_norm(sparse, sparse_weight)
    return (residual + rms_norm(both, out_weight)) * scalar


@dataclass(frozen=True)
class Ops:
    rms_norm: Callable = rms_norm
    norm_rotate: Callable = norm_rotate
    add_norm: Callable = add_norm
    gated_gelu: Callable = gated_gelu
    merge_branches: Callable = merge_branches

    def compiled(self) -> "Ops":
        """The same functions through torch.compile, for any batch and length."""
        # One compilation per rank, with and without weight, with and without gradient.
        torch._dynamo.config.recompile_limit = 64
        return Ops(
            **{f.name: torch.compile(getattr(self, f.name), dynamic=True) for f in fields(self)}
        )
