"""Quantised experts on a CPU, unpacked one at a time for the rows they get."""

from collections.abc import Callable

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu.compat.ops import multiply_int8, quantize_to_int8
from vllm_dllm.cpu.experts import Projection, mix_experts
from vllm_dllm.cpu.quantization import formats
from vllm_dllm.cpu.quantization.formats import Scaled

# Each of the following functions returns the Projection of one matrix [N, K] of each of E experts.
# `dtype` is the model's.


def fp8_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K] float8_e4m3fn
    scales: torch.Tensor,  # [E, N, 1] fp32
) -> Projection:
    """Inputs are quantised row by row."""

    def decode(expert: int) -> Scaled:
        return formats.decode_fp8(weights[expert], scales[expert])

    return _multiply_scaled(dtype, formats.quantize_fp8, decode)


def nvfp4_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K / 2] uint8
    block_scales: torch.Tensor,  # [E, N, K / 16] float8_e4m3fn
    scales: torch.Tensor,  # [E] fp32, multiplies
    input_scale: torch.Tensor,  # [] fp32, divides
) -> Projection:
    """Inputs are quantised by `input_scale`, their global scale."""

    def decode(expert: int) -> Scaled:
        return formats.decode_nvfp4(weights[expert], block_scales[expert], scales[expert])

    return _multiply_scaled(dtype, lambda x: formats.quantize_nvfp4(x, input_scale), decode)


def _multiply_scaled(
    dtype: torch.dtype,
    quantize: Callable[[torch.Tensor], Scaled],
    decode: Callable[[int], Scaled],  # expert -> its weights
) -> Projection:
    return Projection(
        lambda x: quantize(x).to_model_dtype(dtype),
        lambda rows, expert: formats.multiply(rows, decode(expert).to_model_dtype(dtype)),
    )


def int8_projection(
    dtype: torch.dtype,
    handles: torch.Tensor,  # [E] int64, see `ops.Int8Weights`
    weights: torch.Tensor,  # [E, N, 0]; oneDNN has the numbers
) -> Projection:
    """Inputs are quantised row by row."""

    def multiply(rows: Scaled, expert: int) -> torch.Tensor:
        out = torch.empty(len(rows.values), weights.shape[1], dtype=dtype)
        return multiply_int8(rows.values, rows.scale, handles[expert], out)

    return Projection(lambda x: Scaled(*quantize_to_int8(x)), multiply)


def int4_projection(
    dtype: torch.dtype,
    weights: torch.Tensor,  # [E, N, K / 8] int32
    scales: torch.Tensor,  # [E, N, K / group], of the model's type
) -> Projection:
    """Inputs are not quantised."""
    return Projection(
        lambda x: x,
        lambda rows, expert: rows @ formats.decode_int4(weights[expert], scales[expert]).t(),
    )


PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "fp8": fp8_projection,
    "nvfp4": nvfp4_projection,
    "int8": int8_projection,
    "int4": int4_projection,
}


def quantized_experts(
    x: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int, -1 for an expert of another rank
    activation: str,
    number_format: str,
    w13: list[torch.Tensor],
    w2: list[torch.Tensor],
) -> torch.Tensor:
    """Returns `mix_experts` of quantised experts, [T, H]. `number_format`: a key of `PROJECTIONS`.
    `w13` and `w2`: the tensors that its function takes, of matrices [2 I, H] and [H, I]."""
    make = PROJECTIONS[number_format]
    gate_up, down = make(x.dtype, *w13), make(x.dtype, *w2)
    return mix_experts(x, topk_weights, topk_ids, activation, gate_up, down)


direct_register_custom_op(
    "vllm_dllm_quantized_experts", quantized_experts, fake_impl=lambda x, *args: torch.empty_like(x)
)
