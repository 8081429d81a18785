"""A mixture of experts in plain PyTorch: the definition of right, not fast.

In FP8, the rows that a product reads are quantised by their own largest element, and output
channels of the weights have a scale each (compressed-tensors: FP8-dynamic).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of FP8
SMALLEST_SCALE = 1 / (MOST * 512)  # the least scale of a row, as in vLLM's kernels


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by vLLM's names."""


class Experts(NamedTuple):
    """The weights of E experts with K hidden channels and N channels in between; contiguous."""

    gate_up: torch.Tensor  # [E, 2 * N, K] the model's type or e4m3; gate's channels come first
    down: torch.Tensor  # [E, K, N] the same
    gate_up_scale: torch.Tensor | None = None  # [E, 2 * N] fp32; None: not quantised
    down_scale: torch.Tensor | None = None  # [E, K] fp32


class Assignment(NamedTuple):
    """Rows sorted by expert, as vLLM's `moe_align_block_size` returns them. A row is a token with
    one of its experts, numbered `token * top_k + choice`; a block holds rows of one expert."""

    rows: torch.Tensor  # [blocks * size] int32; those from T * top_k on are padding
    experts: torch.Tensor  # [blocks] int32, of each block
    num_rows: torch.Tensor  # [1] int32; what lies behind in both tensors is not set


def mix_experts(
    states: torch.Tensor,  # [T, K] the model's type
    experts: Experts,
    weights: torch.Tensor,  # [T, top_k]
    ids: torch.Tensor,  # [T, top_k] int
    activation: str,
) -> torch.Tensor:
    """Returns the sum over each token's experts of `weight * down(act(gate(x)) * up(x))`, [T, K] in
    the model's type. The input of down and each expert's result are rounded to that type, sums are
    not."""
    x = round_for_product(states, experts)
    found = torch.zeros(states.shape, device=states.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = dequantise_expert(experts, expert)
        gate, up = (x[token] @ gate_up.T).chunk(2, dim=-1)
        inner = (ACTIVATIONS[activation](gate) * up).to(states.dtype)
        rows = (round_for_product(inner, experts) @ down.T).to(states.dtype)
        found.index_add_(0, token, weights[token, choice, None].float() * rows.float())
    return found.to(states.dtype)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows [n, K] quantised to e4m3 [n, K], and a scale for each row, [n, 1] fp32."""
    rows = rows.float()
    scale = (rows.abs().amax(-1, keepdim=True) / MOST).clamp_min(SMALLEST_SCALE)
    return (rows / scale).to(FP8), scale


def sort_by_expert(ids: torch.Tensor, size: int, num_experts: int) -> Assignment:
    """Returns the rows of `ids` [T, top_k] sorted into blocks of `size` rows of one expert. Experts
    without rows have no block."""
    padding, flat = ids.numel(), ids.flatten()
    rows, experts = [], []
    for expert in range(num_experts):
        for block in (flat == expert).nonzero().flatten().split(size):
            if len(block):
                rows.append(F.pad(block, (0, size - len(block)), value=padding))
                experts.append(expert)

    def as_int(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=ids.device)

    return Assignment(as_int(torch.cat(rows)), as_int(experts), as_int([len(experts) * size]))


def round_for_product(rows: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns `rows` [n, K] in fp32, rounded as the experts' products read them: to FP8 and back if
    the experts are quantised."""
    if experts.down_scale is None:
        return rows.float()
    quantised, scale = quantise(rows)
    return quantised.float() * scale


def dequantise_expert(experts: Experts, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an expert's weights in fp32: gate and up [2 * N, K], and down [K, N]."""
    gate_up, down = (part[expert].to(torch.float32, copy=True) for part in experts[:2])
    if experts.gate_up_scale is not None and experts.down_scale is not None:
        gate_up *= experts.gate_up_scale[expert, :, None]
        down *= experts.down_scale[expert, :, None]
    return gate_up, down
