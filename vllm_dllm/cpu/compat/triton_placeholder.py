"""vLLM's placeholder for Triton where that is not installed, and a `triton.jit` of ours in it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import vllm.triton_utils as triton_utils
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

from vllm_dllm.compat.patching import patch


def has_triton() -> bool:
    """Whether vLLM can launch Triton kernels in this process."""
    return triton_utils.HAS_TRITON


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's placeholder for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules that are loaded later, and adds `next_power_of_2`,
    which vLLM's placeholder lacks. Repeatable. Must not be called where vLLM has Triton."""
    assert isinstance(triton_utils.triton, TritonPlaceholder), "vLLM has Triton, which can launch"
    patch("triton_utils:triton.jit", lambda stock: jit)
    patch(
        "triton_utils:triton.next_power_of_2",
        lambda stock: lambda n: 1 << (n - 1).bit_length() if n > 0 else n,
    )


def real_triton_module(placeholder: object) -> ModuleType | None:
    """Returns the module of Triton that `placeholder` stands for, None for other objects."""
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
