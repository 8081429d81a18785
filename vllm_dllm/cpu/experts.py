"""Experts on a CPU, one after the other, each for the rows that chose it.

Whoever calls this is one PyTorch operation, because the compiler must not trace the loop.
"""

from collections.abc import Callable
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""By vLLM's names. PyTorch's use vector instructions. vLLM's operation for CPUs takes each tanh by
itself: in bf16 on one core 9.4 ms for 1,024 rows of 512, as long as half of their products."""


class Projection(NamedTuple):
    """One of an expert's linears."""

    quantize: Callable[[torch.Tensor], Any]
    """Inputs [n, K] -> what `product` takes; its rows can be chosen."""
    product: Callable[[Any, int], torch.Tensor]
    """(Rows, expert) -> [n, N]."""


def mix(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    gate_up: Projection,  # [2 I, H]
    down: Projection,  # [H, I]
) -> torch.Tensor:
    """Sum over a token's experts of `weight * down(act(gate(x)) * up(x))`, [T, H].

    Between operations, numbers have the model's type, as on GPUs. The sum is in fp32.
    """
    experts = topk_ids.flatten().long()
    order = experts.argsort(stable=True)
    tokens = order // topk_ids.shape[1]
    ends = torch.bincount(experts + 1).cumsum(0).tolist()
    first = ends[0]  # those before it are of other ranks
    own = [
        (e, rows) for e, rows in enumerate(starmap(slice, pairwise(ends))) if rows.stop > rows.start
    ]
    if not own:
        return torch.zeros_like(x)
    inputs = gate_up.quantize(x)
    products = [gate_up.product(inputs[tokens[rows]], expert).to(x.dtype) for expert, rows in own]
    projected = torch.cat(products)
    gate, up = projected.chunk(2, dim=-1)
    inner = down.quantize(ACTIVATIONS[activation](gate).mul_(up))
    products = [
        down.product(inner[rows.start - first : rows.stop - first], expert).to(x.dtype)
        for expert, rows in own
    ]
    weights = topk_weights.flatten()[order[first:], None].float()
    total = torch.zeros(x.shape, dtype=torch.float32)
    return total.index_add_(0, tokens[first:], torch.cat(products) * weights).to(x.dtype)
