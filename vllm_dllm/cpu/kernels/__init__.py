"""Replaces vLLM's Triton kernels with objects that can be launched without Triton.

Without Triton, vLLM's `@triton.jit` returns the decorated function, and `kernel[grid](...)` fails.
A kernel with a native version runs that, and any other runs in Triton's own interpreter.

A native version is named like the kernel. It takes those of the kernel's parameters that it needs,
by their names without `_ptr`, and `grid` if it needs that.
"""

import linecache
import sys
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

from vllm.logger import init_logger

from attention_kernels.interpreter import interpret_language
from vllm_dllm.cpu.compat import runner
from vllm_dllm.cpu.kernels import block_table, dflash, input_batch, sampling

logger = init_logger(__name__)

Grid = tuple[int, ...]
Launch = Callable[..., None]

_NATIVE: dict[str, tuple[Launch, ...]] = {
    "block_table": (block_table.compute_slot_mappings, block_table.gather_block_tables),
    "buffer_utils": (block_table.apply_write,),
    "input_batch": (
        input_batch.combine_sampled_and_draft_tokens,
        input_batch.expand_idx_mapping,
        input_batch.get_num_sampled_and_rejected,
        input_batch.post_update,
        input_batch.post_update_num_computed_tokens,
        input_batch.prepare_pos_seq_lens,
        input_batch.prepare_prefill_inputs,
    ),
    "sample.gumbel": (sampling.gumbel_sample, sampling.temperature),
    "sample.logprob": (sampling.ranks, sampling.topk_log_softmax),
    "sample.prompt_logprob": (sampling.prompt_logprobs_token_ids,),
    "spec_decode.dflash.speculator": (dflash.prepare_dflash_inputs,),
    "spec_decode.rejection_sampler": (sampling.flatten_sampled, sampling.gather_draft_sampled),
    "structured_outputs": (sampling.apply_grammar_bitmask,),
}
NATIVE_KERNELS = {
    f"vllm.v1.worker.gpu.{module}._{native.__name__}_kernel": native
    for module, natives in _NATIVE.items()
    for native in natives
}
"""Our functions by the full name of the kernel that each replaces."""


class CpuKernel:
    """Replaces one Triton kernel. A launch runs `native` or, if None, Triton's interpreter."""

    def __init__(self, fn: FunctionType, native: Launch | None) -> None:
        self.fn = fn
        self.native = native
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__
        self._names = [_plain_name(name) for name in _parameters(fn)]
        self._wanted = _parameters(native) if native is not None else ()

    def __getitem__(self, grid: Grid) -> Launch:
        """Returns the function that launches the kernel on `grid` and takes its arguments."""
        return partial(self.interpret if self.native is None else self.run_native, grid)

    def run_native(self, grid: Grid, *args: Any, **kwargs: Any) -> None:
        """Runs `native` with the arguments that it takes."""
        assert self.native is not None
        given = {"grid": grid, **dict(zip(self._names, args, strict=False))}
        given |= {_plain_name(name): value for name, value in kwargs.items()}
        self.native(**{name: given[name] for name in self._wanted if name in given})

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


def _parameters(fn: Any) -> tuple[str, ...]:
    """Returns the names of a function's parameters."""
    return fn.__code__.co_varnames[: fn.__code__.co_argcount]


def _plain_name(name: str) -> str:
    """Returns the name in native versions of a kernel's parameter `name`."""
    return name.removesuffix("_ptr")


def jit(fn: FunctionType | None = None, **options: Any) -> Any:
    """Returns the `CpuKernel` of `fn`, or a decorator if `fn` is None. Takes the place of
    `triton.jit`, whose options only affect Triton's compiler."""
    if fn is None:
        return jit
    return CpuKernel(fn, NATIVE_KERNELS.get(f"{fn.__module__}.{fn.__name__}"))


def replace_kernels() -> None:
    """Replaces the kernels of vLLM's modules, loaded or not yet, by `CpuKernel`s. Repeatable."""
    runner.set_triton_jit(jit)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    kernels = {
        id(value): jit(value)
        for module in filter(runner.uses_triton_placeholder, modules)
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
        real = runner.real_triton_module(value)
        if real is not None:
            fn.__globals__[attribute] = real
    for name, annotation in fn.__annotations__.items():
        if runner.is_placeholder_constexpr(annotation):
            fn.__annotations__[name] = tl.constexpr
    return InterpretedFunction(fn)
