"""Runs a Triton kernel that vLLM loaded without Triton in Triton's own interpreter."""

import sys
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

from vllm_dllm import compat


@cache
def interpreted(fn: FunctionType) -> Any:
    """`fn` as `triton.jit` would return it under TRITON_INTERPRET=1.

    The module of `fn` was loaded with stand-ins for `triton.language`; they are replaced by the
    real modules, which is what the interpreter looks for.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    interpret_triton_language()
    for attribute, value in list(fn.__globals__.items()):
        real = compat.real_triton_module(value)
        if real is not None:
            fn.__globals__[attribute] = real
    fn.__annotations__ = {
        name: tl.constexpr if compat.is_placeholder_constexpr(annotation) else annotation
        for name, annotation in fn.__annotations__.items()
    }
    return InterpretedFunction(fn)


@cache
def interpret_triton_language() -> None:
    """Makes the functions of `triton.language` that are written in Triton callable from an
    interpreted kernel, as they would be had TRITON_INTERPRET been set when Triton was loaded."""
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # For parts of Triton that are loaded from here on; processes started from here are their own.
    with patch.object(triton.knobs, "propagate_env", False):
        triton.knobs.runtime.interpret = True
    # A barrier orders the threads of a block; the interpreter has one.
    tl.debug_barrier = _no_barrier
    stand_ins: dict[int, InterpretedFunction] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("triton.language"):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                stand_in = stand_ins.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(module, attribute, stand_in)
    _accept_integer_masks()


def _accept_integer_masks() -> None:
    """Triton 3.9's interpreter keeps `(a < b) & (c < d)` as the integers of the comparison, and
    then refuses it as a mask."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), *rest)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store


def _no_barrier(*args: Any, **kwargs: Any) -> None:
    pass
