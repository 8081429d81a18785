"""CPU kernels for FP8 and NVFP4 linears that vLLM can choose.

vLLM has one for FP8, around `torch._scaled_mm`. On processors with AMX, PyTorch 2.13 hands that to
a reference implementation of oneDNN: 35 s for [256, 1024] x [1024, 1024] on one core, where the
same product of the same values as floats takes 20 ms.
"""

import torch
from vllm.model_executor.kernels.linear import (
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.compat.linear_kernels import StockFp8LinearKernel, prefer_on_cpus
from vllm_dllm.quantization import nvfp4
from vllm_dllm.quantization.scaled import multiply


def fp8_product(
    a: torch.Tensor,  # [M, K] float8_e4m3fn
    b: torch.Tensor,  # [K, N] float8_e4m3fn
) -> torch.Tensor:
    """a @ b, [M, N] fp32."""
    return a.float() @ b.float()


direct_register_custom_op(
    "vllm_dllm_fp8_product",
    fp8_product,
    fake_impl=lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32),
)


class CpuFp8LinearKernel(StockFp8LinearKernel):
    def get_output_padding(self) -> int | None:
        return None  # rows that `torch._scaled_mm` would like to have

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,  # [M, K] float8_e4m3fn
        B: torch.Tensor,  # [K, N] float8_e4m3fn
        out_dtype: torch.dtype,
        As: torch.Tensor,  # [M, 1] fp32
        Bs: torch.Tensor,  # [N, 1] fp32
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        out = torch.ops.vllm.vllm_dllm_fp8_product(A, B) * As * Bs.t()
        if bias is not None:
            out = out + bias
        return out.to(out_dtype).view(*output_shape)


prefer_on_cpus(CpuFp8LinearKernel)


def nvfp4_linear(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # [N, K / 2] uint8
    block_scale: torch.Tensor,  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor,  # [] fp32, multiplies
    x_global_scale: torch.Tensor,  # [] fp32, divides
) -> torch.Tensor:
    """x @ weight.T [..., N]. One PyTorch operation, so that compiled models round the same."""
    rows = nvfp4.quantize(x.flatten(0, -2), x_global_scale)
    out = multiply(rows, nvfp4.decode(packed, block_scale, scale))
    return out.to(x.dtype).unflatten(0, x.shape[:-1])


def _shape(x: torch.Tensor, packed: torch.Tensor, *args: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


direct_register_custom_op("vllm_dllm_nvfp4_linear", nvfp4_linear, fake_impl=_shape)


class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "it emulates NVFP4 on CPUs"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as they are stored."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.ops.vllm.vllm_dllm_nvfp4_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            layer.input_global_scale_inv,
        )
        return out if bias is None else out + bias


# Once per process. Without a kernel, vLLM would refuse to start.
register_linear_kernel(CpuNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
