"""vLLM's C++ operations for CPUs, and what a process needs to run them."""

from functools import cache

import torch
from vllm import _custom_ops

write_cpu_kv_cache = _custom_ops.cpu_attn_reshape_and_cache

cpp_rms_norm = _custom_ops.rms_norm


class Int8Weights:
    """Matrices prepared for oneDNN's int8 products. It holds copies of the weights, and refers to
    the scales. Operations take `handles` [n] int64, which are valid while this object lives."""

    def __init__(
        self,
        weights: torch.Tensor,  # [n, N, K] int8
        scales: torch.Tensor,  # [n, N, 1] fp32
        dtype: torch.dtype,  # of the products
    ) -> None:
        """Has oneDNN copy each matrix. Keeps `scales`, which the copies refer to."""
        self._scales = scales
        self._matrices = [
            _custom_ops.create_onednn_scaled_mm(weight.t(), scale, dtype, True, False)
            for weight, scale in zip(weights, scales, strict=True)
        ]
        self.handles = torch.stack([matrix.handler_tensor for matrix in self._matrices])


def check_int8_support() -> None:
    """Raises ValueError on a processor that cannot add up products of int8 without overflow."""
    if not int8_sums_are_exact():
        raise ValueError(
            "int8 checkpoints need a processor with VNNI (avx512_vnni or avx_vnni in lscpu): "
            "without it, sums of two products of int8 overflow. Serve the bf16 checkpoint, or "
            "quantise it with --scheme fp8-dynamic."
        )


@cache
def int8_sums_are_exact() -> bool:
    """Whether oneDNN adds up products of int8 in 32 bits here. Without VNNI it uses instructions
    that add two products in 16 bits, with saturation."""
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    # While a model is built, the default type is the model's.
    one = torch.ones(16, 1, dtype=torch.float32)
    matrix = _custom_ops.create_onednn_scaled_mm(
        largest.t(), one, torch.float32, dynamic_quant=True, use_azp=False
    )
    out = torch.empty(16, 16, dtype=torch.float32)
    multiply_int8(largest, one, matrix.handler_tensor, out)
    return bool((out == 64 * 127**2).all())


def quantize_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 values [n, K] and fp32 scales [n, 1]. Value times scale is about x [n, K]."""
    values, scale, _ = _custom_ops.onednn_scaled_int8_quant(x.contiguous())
    return values, scale


def multiply_int8(
    values: torch.Tensor,  # [n, K] int8
    scale: torch.Tensor,  # [n, 1] fp32
    handle: torch.Tensor,  # [] int64, one of `Int8Weights.handles`
    out: torch.Tensor,  # [n, N], written, of the type that the weights were prepared for
) -> torch.Tensor:
    """Writes the product [n, N], scaled, to `out`, and returns `out`."""
    torch.ops._C.onednn_scaled_mm(out, values, scale, None, None, None, handle)
    return out


def request_amx_permission() -> None:
    """Asks Linux to let this process use matrix tiles (AMX), as PyTorch does before its own first
    product on tiles. Does nothing without AMX.

    vLLM's attention in bf16 uses tiles without asking: where a server's first step was too small
    for such a product, it ended the worker (SIGILL).
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
