"""RMS norm by vLLM's own C++ kernel, for models that are not compiled.

Run op by op, a norm is six PyTorch kernels; a layer of Gemma4 has up to ten norms.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig

from vllm_dllm.cpu.compat.ops import cpp_rms_norm

PROVIDER = "vllm_dllm_cpu"


def _supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    # In 16-bit types the kernel rounds once more than the definition does.
    dtypes = {x.dtype} if weight is None else {x.dtype, weight.dtype}
    return variance_size is None and dtypes == {torch.float32}


def register() -> None:
    """Offers the kernel to vLLM's norm layers under the name `PROVIDER`. Repeatable."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        x = x.contiguous()  # the kernel assumes that rows are adjacent
        output = torch.empty_like(x)
        cpp_rms_norm(output, x, weight, epsilon)
        return output


def prefer(vllm_config: VllmConfig) -> None:
    """Makes the kernel the first choice for norms in `vllm_config`'s model, if registered."""
    if PROVIDER in ir.ops.rms_norm.impls:
        norms = vllm_config.kernel_config.ir_op_priority.rms_norm
        norms[:] = [PROVIDER, *(name for name in norms if name != PROVIDER)]
