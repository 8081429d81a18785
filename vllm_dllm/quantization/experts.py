"""Quantised experts on a CPU, unpacked one at a time for the rows they get."""

from collections.abc import Callable

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu import experts
from vllm_dllm.quantization import fp8, nvfp4
from vllm_dllm.quantization.scaled import Scaled, multiply

Quantize = Callable[[torch.Tensor], Scaled]
Weight = Callable[[int], Scaled]  # by expert


def mix(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    gate_up: tuple[Quantize, Weight],  # [2 I, H]
    down: tuple[Quantize, Weight],  # [H, I]
) -> torch.Tensor:
    """See `cpu.experts.mix`."""
    rows_of_all = gate_up[0](x)
    return experts.mix(
        x,
        topk_weights,
        topk_ids,
        activation,
        lambda rows, e: multiply(rows_of_all[rows], gate_up[1](e)).to(x.dtype),
        lambda hidden, e: multiply(down[0](hidden), down[1](e)).to(x.dtype),
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
        (fp8.quantize, lambda e: fp8.decode(w13[e], w13_scale[e])),
        (fp8.quantize, lambda e: fp8.decode(w2[e], w2_scale[e])),
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
        (
            lambda rows: nvfp4.quantize(rows, x_global_scale),
            lambda e: nvfp4.decode(w13[e], w13_block_scale[e], w13_scale[e]),
        ),
        (
            lambda rows: nvfp4.quantize(rows, hidden_global_scale),
            lambda e: nvfp4.decode(w2[e], w2_block_scale[e], w2_scale[e]),
        ),
    )


def _like_x(x: torch.Tensor, *args: object) -> torch.Tensor:
    """What the compiler needs to know about the operations."""
    return torch.empty_like(x)


direct_register_custom_op("vllm_dllm_fp8_experts", fp8_experts, fake_impl=_like_x)
direct_register_custom_op("vllm_dllm_nvfp4_experts", nvfp4_experts, fake_impl=_like_x)
