"""Quantised experts on a CPU, unpacked one at a time for the rows they get. Each format is one
PyTorch operation, see `cpu.experts`."""

from collections.abc import Callable

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu.compat.ops import multiply_int8, quantize_to_int8
from vllm_dllm.cpu.experts import Projection, mix_experts
from vllm_dllm.cpu.quantization.formats import (
    Scaled,
    decode_fp8,
    decode_int4,
    decode_nvfp4,
    multiply,
    quantize_fp8,
    quantize_nvfp4,
)


def _make_projection(
    quantize: Callable[[torch.Tensor], Scaled],
    weight: Callable[[int], Scaled],
    dtype: torch.dtype,  # of the model
) -> Projection:
    """Returns a Projection that quantises its inputs by `quantize` and decodes the weights of one
    expert at a time by `weight(expert)`."""
    return Projection(
        lambda x: quantize(x).to_model_dtype(dtype),
        lambda rows, expert: multiply(rows, weight(expert).to_model_dtype(dtype)),
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
    """Returns `mix_experts` of experts in FP8, [T, H]. The first four arguments are those of
    `mix_experts`. Weights are decoded one expert at a time, inputs quantised row by row."""
    return mix_experts(
        x,
        topk_weights,
        topk_ids,
        activation,
        _make_projection(quantize_fp8, lambda e: decode_fp8(w13[e], w13_scale[e]), x.dtype),
        _make_projection(quantize_fp8, lambda e: decode_fp8(w2[e], w2_scale[e]), x.dtype),
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
    """Returns `mix_experts` of experts in NVFP4, [T, H]. The first four arguments are those of
    `mix_experts`. Weights are decoded one expert at a time, inputs quantised by the given global
    scales."""
    return mix_experts(
        x,
        topk_weights,
        topk_ids,
        activation,
        _make_projection(
            lambda rows: quantize_nvfp4(rows, x_global_scale),
            lambda e: decode_nvfp4(w13[e], w13_block_scale[e], w13_scale[e]),
            x.dtype,
        ),
        _make_projection(
            lambda rows: quantize_nvfp4(rows, hidden_global_scale),
            lambda e: decode_nvfp4(w2[e], w2_block_scale[e], w2_scale[e]),
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
    """Returns `mix_experts` of experts in int8, [T, H], by oneDNN's products. The first four
    arguments are those of `mix_experts`. Inputs are quantised row by row."""

    def projection(handles: torch.Tensor, num_out: int) -> Projection:
        def product(rows: Scaled, expert: int) -> torch.Tensor:
            out = x.new_empty(len(rows.values), num_out)
            return multiply_int8(rows.values, rows.scale, handles[expert], out)

        return Projection(lambda rows: Scaled(*quantize_to_int8(rows)), product)

    gate_up, down = projection(w13, 2 * num_inner), projection(w2, x.shape[1])
    return mix_experts(x, topk_weights, topk_ids, activation, gate_up, down)


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
    """Returns `mix_experts` of experts with 4-bit weights, [T, H]. The first four arguments are
    those of `mix_experts`. Weights are decoded one expert at a time, inputs are not quantised."""

    def projection(packed: torch.Tensor, scale: torch.Tensor) -> Projection:
        return Projection(
            lambda rows: rows, lambda rows, e: rows @ decode_int4(packed[e], scale[e]).t()
        )

    gate_up, down = projection(w13, w13_scale), projection(w2, w2_scale)
    return mix_experts(x, topk_weights, topk_ids, activation, gate_up, down)


def _like_expert_output(x: torch.Tensor, *args: object) -> torch.Tensor:
    """Returns an uninitialised output [T, H], from which the compiler learns its shape and type."""
    return torch.empty_like(x)


for name, run in (
    ("fp8", fp8_experts),
    ("nvfp4", nvfp4_experts),
    ("int8", int8_experts),
    ("int4", int4_experts),
):
    direct_register_custom_op(f"vllm_dllm_{name}_experts", run, fake_impl=_like_expert_output)
