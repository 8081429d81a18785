"""The Triton version of the attention, ready to run on this machine."""

from types import ModuleType

import torch

from attention_kernels import chunks, tiling, triton_fwd, triton_kernels
from attention_kernels.interpreter import interpret_kernels


def interpreted_without_gpu() -> ModuleType:
    """`triton_fwd`, its kernels in Triton's interpreter where there is no GPU."""
    if not torch.cuda.is_available():
        interpret_kernels(tiling, triton_kernels, triton_fwd, chunks)
    return triton_fwd
