"""RMS norm by vLLM's C++ kernel, for models that are not compiled.

Run op by op, a norm is six PyTorch kernels, and a layer of Gemma4 has up to ten norms.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig

from vllm_dllm.cpu.compat.ops import cpp_rms_norm

NORM_PROVIDER = "vllm_dllm_cpu"
"""The kernel's name among vLLM's implementations of RMS norm."""


def _norm_supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether vLLM's C++ kernel computes a norm as vLLM defines it: only in fp32, since in 16-bit
    types it rounds once more, and over whole rows."""
    dtypes = {x.dtype} if weight is None else {x.dtype, weight.dtype}
    return variance_size is None and dtypes == {torch.float32}


def register_cpp_norm() -> None:
    """Adds vLLM's C++ kernel to vLLM's kinds of RMS norm, as `NORM_PROVIDER`. Repeatable."""
    if NORM_PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(NORM_PROVIDER, supports_args=_norm_supports)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        x = x.contiguous()  # the kernel assumes that rows are adjacent
        output = torch.empty_like(x)
        cpp_rms_norm(output, x, weight, epsilon)
        return output


def prefer_cpp_norm(vllm_config: VllmConfig) -> None:
    """Puts `NORM_PROVIDER`, if registered, first for norms in `vllm_config`, in place."""
    if NORM_PROVIDER in ir.ops.rms_norm.impls:
        norms = vllm_config.kernel_config.ir_op_priority.rms_norm
        norms[:] = [NORM_PROVIDER, *(name for name in norms if name != NORM_PROVIDER)]
