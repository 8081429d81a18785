"""Experts on a CPU, one after the other, each for the rows that chose it.

Whoever calls this is one PyTorch operation, because the compiler must not trace the loop.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

GateUp = Callable[[torch.Tensor, int], torch.Tensor]
"""Numbers of rows [n], expert -> their gates and ups [n, 2 I]."""
Down = Callable[[torch.Tensor, int], torch.Tensor]
"""[n, I], expert -> [n, H]."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""By vLLM's names. PyTorch's use vector instructions. vLLM's operation for CPUs takes each tanh by
itself: in bf16 on one core 9.4 ms for 1,024 rows of 512, as long as half of their products."""


def mix(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    gate_up: GateUp,
    down: Down,
) -> torch.Tensor:
    """Sum over a token's experts of `weight * down(act(gate(x)) * up(x))`, [T, H].

    Between operations, numbers have the model's type, as on GPUs. The sum is in fp32.
    """
    act = ACTIVATIONS[activation]
    total = torch.zeros(x.shape, dtype=torch.float32)
    weights, ids = topk_weights.float().flatten(), topk_ids.flatten().long()
    by_expert = ids.argsort(stable=True).split(torch.bincount(ids + 1).tolist())
    for expert, choices in enumerate(by_expert, start=-1):
        if expert < 0 or not len(choices):
            continue
        rows = choices // topk_ids.shape[1]
        gate, up = gate_up(rows, expert).chunk(2, dim=-1)
        out = down(act(gate).mul_(up), expert)
        total.index_add_(0, rows, out * weights[choices, None])
    return total.to(x.dtype)
