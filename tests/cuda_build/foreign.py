"""Kernels in other languages than C++ and Triton, which no operation of PyTorch stands for.
vLLM's are replaced by what they compute; FlashAttention-4 is compiled and not run."""

import os
import sys
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.cuda_build.device import GpuDevice
from tests.gpu_dry_run import fake_cuda
from vllm_dllm.compat import version

fake_cuda.STAND_INS.add(__file__)


def replace(device: GpuDevice) -> None:
    """Wherever they were imported to."""
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16
    from vllm.utils import mem_utils

    _everywhere(ll_bf16.ll_bf16_gemm, _gemm)
    if version.is_at_least("0.33"):
        from vllm.model_executor.kernels.linear.cute_dsl import ll_fp32w

        ll_fp32w.LLFp32WGemm.__call__ = _fp32_gemm  # which it warms up, too
    _everywhere(mem_utils.get_max_shared_memory_bytes, _shared_memory)
    if "FLASH_ATTENTION_ARCH" in os.environ:
        _compile_fa4_later(device)


def _compile_fa4_later(device: GpuDevice) -> None:
    """Replaces FlashAttention-4 when it is first run. It reads the environment when it is imported,
    and an engine may have written there."""
    import vllm.vllm_flash_attn as package

    attend, is_replaced = package.flash_attn_varlen_func, []

    @wraps(attend)
    def replace_and_attend(*args: Any, fa_version: int = 2, **kwargs: Any) -> Any:
        if fa_version == 4 and not is_replaced:
            is_replaced.append(True)
            _compile_fa4(device)
        return attend(*args, fa_version=fa_version, **kwargs)

    _everywhere(attend, replace_and_attend)


def _compile_fa4(device: GpuDevice) -> None:
    import cutlass.cute as cute
    from vllm.vllm_flash_attn.cute import interface

    compile_, package = cute.compile, interface.__package__

    def compile_and_count(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        device.compiled_by_cute += type(kernel).__module__.startswith(package)  # vLLM has others
        return compile_(kernel, *args, **kwargs)

    cute.compile = compile_and_count
    attend = interface._flash_attn_fwd

    @wraps(attend)  # whose cache of kernels goes along
    def compile_only(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device.launches.append("FlashAttention-4")
        device.kernels["FlashAttention-4"] = device.kernels.get("FlashAttention-4", 0) + 1
        device.reads(tensors)
        number = len(attend.compile_cache.cache)
        with device._fake:  # by which it knows that there is nothing to run on
            made = attend(*args, **kwargs)
        if len(attend.compile_cache.cache) > number:
            device.compiled.append("FlashAttention-4")
        return made

    interface._flash_attn_fwd = compile_only


def _gemm(states: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.mm(states, weight.t())


def _fp32_gemm(
    kernel: Any,
    states: torch.Tensor,
    weight: torch.Tensor,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return torch.mm(states.float(), weight.t()).to(output_dtype)


def _shared_memory(gpu: int = 0) -> int:
    return torch.cuda.get_device_properties(gpu).shared_memory_per_block_optin


def _everywhere(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        names = [name for name, value in vars(module).items() if value is old]
        for name in names if getattr(module, "__name__", "").startswith("vllm") else ():
            setattr(module, name, new)
