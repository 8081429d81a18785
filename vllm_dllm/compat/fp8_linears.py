"""Linears in FP8 that vLLM has CUTLASS multiply, and vLLM's other kernel for the same weights."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import (
    triton_scaled_mm,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)


class Product(NamedTuple):
    """A product of matrices in FP8, a @ b with scales and a bias."""

    a: torch.Tensor  # [M, K] e4m3
    a_scale: torch.Tensor  # [M, 1] fp32
    b: torch.Tensor  # [K, N] e4m3, a transposed view of what is stored
    b_scale: torch.Tensor  # [N, 1] or [N] fp32
    bias: torch.Tensor | None  # [N]
    dtype: torch.dtype  # of the result


class OpenFp8Linear(CutlassFP8ScaledMMLinearKernel):
    """vLLM's linear by CUTLASS, whose product is one operation for torch.compile, so that another
    kernel can be chosen after the model is compiled: `measured/fp8_linears.py`."""

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Returns the `Product` of these arguments in the shape `output_shape`."""
        product = torch.ops.vllm.vllm_dllm_fp8_linear(A, As, B, Bs, bias, out_dtype)
        return product.view(*output_shape)


def open_fp8_linears(modules: Iterable[Any]) -> None:
    """Makes the products of FP8 linears an operation of ours. Must be called before the model is
    compiled. Other formats, scales and kernels, and weights that vLLM pads, are left alone."""
    for layer, stock in _find_by_kernel(modules, CutlassFP8ScaledMMLinearKernel):
        keys = (stock.config.weight_quant_key, stock.config.activation_quant_key)
        # Linears that every rank has whole have no size of a rank's part.
        inputs = getattr(layer, "input_size_per_partition", layer.input_size)
        shape = (inputs, stock.logical_output_size)
        if keys == (kFp8StaticChannelSym, kFp8DynamicTokenSym) and layer.weight.shape == shape:
            stock.__class__ = OpenFp8Linear


def opened_fp8_linears(modules: Iterable[Any]) -> Iterator[LinearBase]:
    """Yields the layers that `open_fp8_linears` has changed. Their `weight` is [K, N] e4m3 and
    their `weight_scale` [N, 1] fp32."""
    return (layer for layer, _ in _find_by_kernel(modules, OpenFp8Linear))


def _find_by_kernel(modules: Iterable[Any], kernel: type) -> Iterator[tuple[LinearBase, Any]]:
    """Yields the linears that a kernel of this very class computes, each with its kernel."""
    for module in modules:
        if isinstance(module, LinearBase):
            owner = getattr(module, "scheme", module.quant_method)  # compressed-tensors has both
            found = getattr(owner, "fp8_linear", getattr(owner, "kernel", None))  # ModelOpt's name
            if type(found) is kernel:
                yield module, found


def multiply_by_cutlass(product: Product) -> torch.Tensor:
    """Returns a product [M, N]."""
    a, a_scale, b, b_scale, bias, dtype = product
    return ops.cutlass_scaled_mm(a, b, a_scale, b_scale, dtype, bias)


def multiply_by_triton(product: Product) -> torch.Tensor:
    """Returns a product [M, N], by vLLM's Triton kernel."""
    a, a_scale, b, b_scale, bias, dtype = product
    found: torch.Tensor = triton_scaled_mm(a, b, a_scale, b_scale, dtype, bias)
    return found
