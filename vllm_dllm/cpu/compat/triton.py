"""vLLM's stand-in for Triton, where Triton has no backend for this machine."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import vllm.triton_utils as triton_utils
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

from vllm_dllm.compat.patching import replace


def has_triton() -> bool:
    return triton_utils.HAS_TRITON


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's stand-in for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules loaded from now on, and fills in the function of
    Triton that runner v2 calls and vLLM's stand-in lacks."""
    is_stand_in = isinstance(triton_utils.triton, TritonPlaceholder)
    assert is_stand_in, "vLLM has Triton: its kernels can be launched"
    replace("triton_utils:triton.jit", lambda stock: jit)
    replace(
        "triton_utils:triton.next_power_of_2",
        lambda stock: lambda n: 1 << (n - 1).bit_length() if n > 0 else n,
    )


def real_triton_module(placeholder: object) -> ModuleType | None:
    """The module of Triton that `placeholder` stands for, or None if it is something else."""
    if placeholder is triton_utils.tl:
        import triton.language as tl

        return tl
    if placeholder is triton_utils.tldevice:
        from triton.language.extra import libdevice

        return libdevice
    return None


def is_placeholder_constexpr(annotation: object) -> bool:
    """Whether `annotation` was written `tl.constexpr` in a module loaded without Triton."""
    tl = triton_utils.tl
    return isinstance(tl, TritonLanguagePlaceholder) and annotation is tl.constexpr
