"""CPU kernels for FP8, NVFP4 and W4A16 linears that vLLM can choose. vLLM's own int8 kernel is
good.

vLLM's FP8 kernel calls `torch._scaled_mm`. On processors with AMX, PyTorch 2.13 passes that to a
reference implementation of oneDNN: 35 s for [256, 1024] x [1024, 1024] on one core, where the
product of the same values as floats takes 20 ms. Its W4A16 kernel takes twice as long without AMX
as unpacking the weights and multiplying (256 x 1024 x 1024 on one core: 5.9 ms, 3.1 ms; 2.4 ms in
bf16).
"""

import torch
from vllm.model_executor.kernels.linear import (
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_linear_kernel,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.cpu import formats
from vllm_dllm.cpu.compat.kernels import (
    Fp32Int8LinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    StockFp8LinearKernel,
    prefer_linear_kernel,
)
from vllm_dllm.cpu.experts import PROJECTIONS


def fp8_product(
    a: torch.Tensor,  # [M, K] float8_e4m3fn
    a_scale: torch.Tensor,  # [M, 1] fp32
    b: torch.Tensor,  # [K, N] float8_e4m3fn, a transposed view of what is stored
    b_scale: torch.Tensor,  # [N, 1] fp32
    dtype: torch.dtype,  # of the model
) -> torch.Tensor:
    """Returns a @ b with its scales, [M, N] fp32. A bf16 model rounds sums to bf16 before
    scaling."""
    rows, weight = formats.decode_fp8(a, a_scale), formats.decode_fp8(b.t(), b_scale)
    return formats.multiply(rows.to_model_dtype(dtype), weight.to_model_dtype(dtype))


direct_register_custom_op(
    "vllm_dllm_fp8_product",
    fp8_product,
    fake_impl=lambda a, a_scale, b, b_scale, dtype: a.new_empty(
        a.shape[0], b.shape[1], dtype=torch.float32
    ),
)


class CpuFp8LinearKernel(StockFp8LinearKernel):
    """FP8 linears whose values are multiplied as floats."""

    def get_output_padding(self) -> int | None:
        """Returns None, for no padding rows, which only `torch._scaled_mm` would want."""
        return None

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
        """Returns A @ B with its scales and bias, as `out_dtype` in the shape `output_shape`."""
        out = torch.ops.vllm.vllm_dllm_fp8_product(A, As, B, Bs, out_dtype)
        if bias is not None:
            out = out + bias
        return out.to(out_dtype).view(*output_shape)


prefer_linear_kernel("fp8", CpuFp8LinearKernel)


def quantized_linear(
    x: torch.Tensor,  # [..., K]
    number_format: str,
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    """Returns x @ weight.T [..., N], in the type of `x`. As one PyTorch operation it rounds the
    same in compiled models. `number_format`: a key of `PROJECTIONS`. `tensors`: what its function
    takes, of one matrix [1, N, ...]."""
    projection = PROJECTIONS[number_format](x.dtype, *tensors)
    out = projection.product(projection.quantize(x.flatten(0, -2)), 0)
    return out.to(x.dtype).unflatten(0, x.shape[:-1])


direct_register_custom_op(
    "vllm_dllm_quantized_linear",
    quantized_linear,
    fake_impl=lambda x, number_format, tensors: x.new_empty(*x.shape[:-1], tensors[0].shape[1]),
)


class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    """NVFP4 linears, emulated: vLLM has no kernel for them on CPUs."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "it emulates NVFP4 on CPUs"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: the weights are used as they are stored."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the layer's output [..., N] for `x` [..., K]."""
        weights = (layer.weight, layer.weight_scale, layer.weight_global_scale)
        tensors = [*(weight[None] for weight in weights), layer.input_global_scale_inv]
        out = torch.ops.vllm.vllm_dllm_quantized_linear(x, "nvfp4", tensors)
        return out if bias is None else out + bias


# Once per process. Without a kernel, vLLM would refuse to start.
register_linear_kernel(CpuNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


class CpuInt4LinearKernel(MPLinearKernel):
    """Linears with 4-bit weights, unpacked at every call."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Returns whether this kernel is faster than vLLM's for a layer, and if not, why."""
        if not current_platform.is_cpu():
            return False, "it is for CPUs"
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, "it unpacks 4-bit integers without zero points"
        if torch.cpu._is_amx_tile_supported() and c.act_type == torch.bfloat16:
            return False, "vLLM's own kernel uses AMX"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Transposes GPTQ's weights [K / 8, N] and scales [K / group, N]. compressed-tensors' are
        used as they are stored."""
        for name in (self.w_q_name, self.w_s_name):
            parameter = getattr(layer, name)
            if parameter.output_dim == 1:
                parameter.data = parameter.t().contiguous()

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        packed, scale, _ = self._get_weight_params(layer)
        out = torch.ops.vllm.vllm_dllm_quantized_linear(x, "int4", [packed[None], scale[None]])
        return out if bias is None else out + bias


prefer_linear_kernel("int4", CpuInt4LinearKernel)
prefer_linear_kernel("int8", Fp32Int8LinearKernel)
