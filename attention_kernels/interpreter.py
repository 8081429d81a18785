"""Runs Triton kernels on a machine without a GPU, in Triton's own interpreter.

Like TRITON_INTERPRET=1, but that variable must be set before Triton is imported; these functions
may be called later. Never use it with bf16, which the interpreter multiplies wrongly.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any


def interpret_kernels(*modules: ModuleType) -> None:
    """Replaces the kernels and Triton functions of `modules` by interpreted ones, in place and for
    good."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpret_language()
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


@cache
def interpret_language() -> None:
    """Patches `triton.language`, for as long as the process lives: those of its functions that are
    written in Triton become callable from an interpreted kernel, as if TRITON_INTERPRET had been
    set when Triton was loaded."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # For parts of Triton that are loaded later. Processes started from here are not affected.
    propagates, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = propagates
    # A barrier orders the threads of a block; the interpreter has one.
    tl.debug_barrier = lambda *_, **__: None
    libdevice.log1p = lambda x: tl.log(1.0 + x)  # the interpreter's device functions return None
    stand_ins: dict[int, InterpretedFunction] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("triton.language"):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                stand_in = stand_ins.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(module, attribute, stand_in)
    _accept_integer_masks()
    _carry_when_rounding_to_fp8()


def _accept_integer_masks() -> None:
    """Patches the interpreter to take integers as masks: Triton 3.9's keeps `(a < b) & (c < d)` as
    integers and then refuses them."""
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


def _carry_when_rounding_to_fp8() -> None:
    """Patches the interpreter's rounding to e4m3, which halves numbers that round up to a power of
    two: 31.8 becomes 16."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert, largest = interpreter._convert_float, torch.finfo(torch.float8_e4m3fn).max

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(data, source, target, rounding)
        floats = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.float32).copy())
        fp8 = floats.clamp(-largest, largest).to(torch.float8_e4m3fn)
        return fp8.view(torch.uint8).numpy().reshape(data.shape)

    interpreter._convert_float = rounded
