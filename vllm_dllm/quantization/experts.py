"""Quantised experts on a CPU, unpacked one at a time for the rows they get.

Each format is one PyTorch operation, because the compiler must not trace the loop over experts.
"""

from collections.abc import Callable
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.compat.cpu_ops import int8_product, quantize_to_int8
from vllm_dllm.quantization import fp8, int4, nvfp4
from vllm_dllm.quantization.scaled import Scaled, multiply


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
    experts = topk_ids.flatten()
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
    hidden = projected.new_empty(len(projected), projected.shape[1] // 2)
    apply_moe_activation(MoEActivation(activation), hidden, projected)
    inner = down.quantize(hidden)
    products = [
        down.product(inner[rows.start - first : rows.stop - first], expert).to(x.dtype)
        for expert, rows in own
    ]
    weights = topk_weights.flatten()[order[first:], None].float()
    total = torch.zeros(x.shape, dtype=torch.float32)
    return total.index_add_(0, tokens[first:], torch.cat(products) * weights).to(x.dtype)


def _scaled(
    quantize: Callable[[torch.Tensor], Scaled],
    weight: Callable[[int], Scaled],
    dtype: torch.dtype,  # of the model
) -> Projection:
    return Projection(
        lambda x: quantize(x).for_model(dtype),
        lambda rows, expert: multiply(rows, weight(expert).for_model(dtype)),
    )


def fp8_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w13: torch.Tensor,  # [E, 2 I, H] float8_e4m3fn
    w13_scale: torch.Tensor,  # [E, 2 I, 1] fp32
    w2: torch.Tensor,  # [E, H, I] float8_e4m3fn
    w2_scale: torch.Tensor,  # [E, H, 1] fp32
) -> torch.Tensor:
    return mix(
        x,
        topk_weights,
        topk_ids,
        activation,
        _scaled(fp8.quantize, lambda e: fp8.decode(w13[e], w13_scale[e]), x.dtype),
        _scaled(fp8.quantize, lambda e: fp8.decode(w2[e], w2_scale[e]), x.dtype),
    )


def nvfp4_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w13: torch.Tensor,  # [E, 2 I, H / 2] uint8
    w13_block_scale: torch.Tensor,  # [E, 2 I, H / 16] float8_e4m3fn
    w13_scale: torch.Tensor,  # [E] fp32, multiplies
    w2: torch.Tensor,  # [E, H, I / 2] uint8
    w2_block_scale: torch.Tensor,  # [E, H, I / 16] float8_e4m3fn
    w2_scale: torch.Tensor,  # [E] fp32, multiplies
    x_global_scale: torch.Tensor,  # [] fp32, divides
    hidden_global_scale: torch.Tensor,  # [] fp32, divides
) -> torch.Tensor:
    return mix(
        x,
        topk_weights,
        topk_ids,
        activation,
        _scaled(
            lambda rows: nvfp4.quantize(rows, x_global_scale),
            lambda e: nvfp4.decode(w13[e], w13_block_scale[e], w13_scale[e]),
            x.dtype,
        ),
        _scaled(
            lambda rows: nvfp4.quantize(rows, hidden_global_scale),
            lambda e: nvfp4.decode(w2[e], w2_block_scale[e], w2_scale[e]),
            x.dtype,
        ),
    )


def int8_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w13: torch.Tensor,  # [E] int64, handles of [2 I, H]
    w2: torch.Tensor,  # [E] int64, handles of [H, I]
    num_inner: int,  # I
) -> torch.Tensor:
    def projection(handles: torch.Tensor, num_out: int) -> Projection:
        def product(rows: Scaled, expert: int) -> torch.Tensor:
            out = x.new_empty(len(rows.values), num_out)
            return int8_product(rows.values, rows.scale, handles[expert], out)

        return Projection(lambda rows: Scaled(*quantize_to_int8(rows)), product)

    gate_up, down = projection(w13, 2 * num_inner), projection(w2, x.shape[1])
    return mix(x, topk_weights, topk_ids, activation, gate_up, down)


def int4_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w13: torch.Tensor,  # [E, 2 I, H / 8] int32
    w13_scale: torch.Tensor,  # [E, 2 I, H / group]
    w2: torch.Tensor,  # [E, H, I / 8] int32
    w2_scale: torch.Tensor,  # [E, H, I / group]
) -> torch.Tensor:
    def projection(packed: torch.Tensor, scale: torch.Tensor) -> Projection:
        return Projection(
            lambda rows: rows, lambda rows, e: rows @ int4.decode(packed[e], scale[e]).t()
        )

    gate_up, down = projection(w13, w13_scale), projection(w2, w2_scale)
    return mix(x, topk_weights, topk_ids, activation, gate_up, down)


def _like_x(x: torch.Tensor, *args: object) -> torch.Tensor:
    """What the compiler needs to know about the operations."""
    return torch.empty_like(x)


for name, run in (
    ("fp8", fp8_experts),
    ("nvfp4", nvfp4_experts),
    ("int8", int8_experts),
    ("int4", int4_experts),
):
    direct_register_custom_op(f"vllm_dllm_{name}_experts", run, fake_impl=_like_x)
