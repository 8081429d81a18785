"""Kernels in other languages than C++ and Triton, which no operation of PyTorch stands for.
vLLM's are replaced by what they compute; FlashAttention-4 is compiled and not run."""

import os
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.cuda_build.device import GpuDevice
from tests.gpu_dry_run import fake_cuda

fake_cuda.STAND_INS.add(__file__)
FA4 = (
    ("FLASH_ATTENTION_ARCH", "sm_90"),
    ("CUTE_DSL_ARCH", "sm_90a"),
    ("FLASH_ATTENTION_NUM_SMS", "132"),
)
"""Variables of the environment that FlashAttention-4 reads when it is imported."""


def replace(device: GpuDevice) -> None:
    """Wherever they were imported to."""
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

    _everywhere(ll_bf16.ll_bf16_gemm, _gemm)
    if FA4[0][0] in os.environ:
        _compile_fa4(device)


def _compile_fa4(device: GpuDevice) -> None:
    from attention_kernels import fa4_fwd

    attend = fa4_fwd._flash_attn_fwd

    def compile_only(*args: Any, **kwargs: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device.launches.append("FlashAttention-4")
        device.kernels["FlashAttention-4"] = device.kernels.get("FlashAttention-4", 0) + 1
        device.reads(tensors)
        with device._fake:  # by which it knows that there is nothing to run on
            attend(*args, **kwargs)

    fa4_fwd._flash_attn_fwd = compile_only


def _gemm(states: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.mm(states, weight.t())


def _everywhere(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        names = [name for name, value in vars(module).items() if value is old]
        for name in names if getattr(module, "__name__", "").startswith("vllm") else ():
            setattr(module, name, new)
