"""Runs a Triton kernel that vLLM loaded without Triton in Triton's own interpreter."""

from functools import cache
from types import FunctionType
from typing import Any

from attention_kernels.interpreter import interpret_language
from vllm_dllm.cpu.compat.triton import is_placeholder_constexpr, real_triton_module


@cache
def interpreted(fn: FunctionType) -> Any:
    """`fn` as `triton.jit` would return it under TRITON_INTERPRET=1.

    The module of `fn` was loaded with placeholders for `triton.language`. They are replaced with
    the real modules, which the interpreter looks for.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    interpret_language()
    for attribute, value in list(fn.__globals__.items()):
        real = real_triton_module(value)
        if real is not None:
            fn.__globals__[attribute] = real
    fn.__annotations__ = {
        name: tl.constexpr if is_placeholder_constexpr(annotation) else annotation
        for name, annotation in fn.__annotations__.items()
    }
    return InterpretedFunction(fn)
