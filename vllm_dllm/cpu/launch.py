"""Replaces vLLM's Triton kernels with objects that can be launched without Triton.

Without Triton, vLLM's `@triton.jit` returns the decorated function, and `kernel[grid](...)` fails.
A kernel that has no native version runs in Triton's own interpreter.
"""

import linecache
import sys
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

from vllm.logger import init_logger

from attention_kernels.interpreter import interpret_language
from vllm_dllm.cpu.compat import triton_placeholder

logger = init_logger(__name__)

Grid = tuple[int, ...]
Launch = Callable[..., None]


class CpuKernel:
    """Replaces one Triton kernel. A launch runs `native` or, if None, Triton's interpreter."""

    def __init__(self, fn: FunctionType, native: Launch | None) -> None:
        self.fn = fn
        self.native = native
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__

    def __getitem__(self, grid: Grid) -> Launch:
        """Returns the function that launches the kernel on `grid` and takes its arguments."""
        return partial(self.native or self.interpret, grid)

    def interpret(self, grid: Grid, *args: Any, **kwargs: Any) -> None:
        """Runs the kernel on `grid` in Triton's interpreter, and logs that once a kernel."""
        logger.warning_once(
            "Kernel %s.%s has no native CPU version and runs in Triton's interpreter, slowly.",
            self.__module__,
            self.__name__,
        )
        make_interpreted(self.fn)[grid](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function in Triton's interpreter, for a kernel that calls this one."""
        return make_interpreted(self.fn)(*args, **kwargs)


def kernel_name(fn: FunctionType) -> str:
    """Returns the module and name of a kernel, as in `NATIVE_KERNELS`."""
    return f"{fn.__module__}.{fn.__name__}"


def jit(fn: FunctionType | None = None, **options: Any) -> Any:
    """Returns the `CpuKernel` of `fn`, or a decorator if `fn` is None. Takes the place of
    `triton.jit`, whose options only affect Triton's compiler."""
    if fn is None:
        return jit
    from vllm_dllm.cpu.kernels import NATIVE_KERNELS

    return CpuKernel(fn, NATIVE_KERNELS.get(kernel_name(fn)))


def replace_kernels() -> None:
    """Replaces the kernels of vLLM's modules, loaded or not yet, by `CpuKernel`s. Repeatable."""
    triton_placeholder.set_triton_jit(jit)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    kernels = {
        id(value): jit(value)
        for module in filter(triton_placeholder.uses_triton_placeholder, modules)
        for value in list(vars(module).values())
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and _is_jitted(value)
    }
    # Also in modules that did `from module import kernel`.
    for module in modules:
        for attribute, value in list(vars(module).items()):
            if id(value) in kernels:
                setattr(module, attribute, kernels[id(value)])


def _is_jitted(fn: FunctionType) -> bool:
    """Whether the source of `fn` is decorated with `@triton.jit`."""
    # The code object starts at the first decorator.
    line_number = fn.__code__.co_firstlineno
    while line := linecache.getline(fn.__code__.co_filename, line_number).strip():
        if line.startswith("@triton.jit"):
            return True
        if line.startswith("def "):
            return False
        line_number += 1
    return False


@cache
def make_interpreted(fn: FunctionType) -> Any:
    """Returns `fn` as `triton.jit` would under TRITON_INTERPRET=1. Replaces placeholders for
    `triton.language` in the annotations of `fn` and the globals of its module, in place, by the
    real modules, which the interpreter looks for."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    interpret_language()
    for attribute, value in list(fn.__globals__.items()):
        real = triton_placeholder.real_triton_module(value)
        if real is not None:
            fn.__globals__[attribute] = real
    for name, annotation in fn.__annotations__.items():
        if triton_placeholder.is_placeholder_constexpr(annotation):
            fn.__annotations__[name] = tl.constexpr
    return InterpretedFunction(fn)
