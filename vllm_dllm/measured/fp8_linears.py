"""Finds which kernel multiplies FP8 linears fastest: vLLM's choice CUTLASS, PyTorch's row-wise
product (cuBLASLt), or vLLM's Triton kernel.

vLLM compiles linears into the model before there is a cache, and before anything is timed. So they
multiply by one operation, which looks up its kernel when it runs. CUDA graphs keep the kernel of
their capture.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_dllm.compat.fp8_linears import (
    Product,
    multiply_by_cutlass,
    multiply_by_triton,
    opened_fp8_linears,
)
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

FP8 = torch.float8_e4m3fn

Kernels = Mapping[str, Mapping[str, str]]
"""By the shape of a weight, as `shape_name` says it, and the rows of a step, which are strings as
in JSON: a key of `CANDIDATES`. Shapes that are missing run CUTLASS."""


def multiply_by_pytorch(product: Product) -> torch.Tensor:
    """Returns a product [M, N]. Raises RuntimeError where PyTorch has no row-wise one: for fp16,
    and on GPUs before Hopper."""
    a, a_scale, b, b_scale, bias, dtype = product
    return torch._scaled_mm(
        a, b, scale_a=a_scale, scale_b=b_scale.view(1, -1), bias=bias, out_dtype=dtype
    )


CUTLASS = "CUTLASS"
CANDIDATES: dict[str, Callable[[Product], torch.Tensor]] = {
    CUTLASS: multiply_by_cutlass,
    "PyTorch": multiply_by_pytorch,
    "Triton": multiply_by_triton,
}

_in_use: dict[str, Mapping[str, str]] = {}
"""The `Kernels` of this process, which serves one model."""


def shape_name(weight: torch.Tensor) -> str:
    """Returns the name of the shape of a weight [K, N], as in "2816x8192"."""
    return "x".join(map(str, weight.shape))


def use_kernels(kernels: Kernels) -> None:
    """Makes opened linears multiply by these kernels from now on. A step runs what was fastest for
    the nearest timed number of rows, as vLLM picks tiles of experts."""
    _in_use.clear()
    _in_use.update(kernels)


def _multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the `Product` of these arguments, by the kernel in use."""
    chosen, name = _in_use.get(shape_name(b)), CUTLASS
    if chosen:
        name = chosen[min(chosen, key=lambda rows: abs(int(rows) - len(a)))]
    return CANDIDATES[name](Product(a, a_scale, b, b_scale, bias, dtype))


direct_register_custom_op(
    "vllm_dllm_fp8_linear",
    _multiply,
    fake_impl=lambda a, a_scale, b, b_scale, bias, dtype: a.new_empty(
        a.shape[0], b.shape[1], dtype=dtype
    ),
)


def measure_fp8_linears(
    modules: Iterable[Any],  # of the model, on its device; all but opened linears are ignored
    dtype: torch.dtype,  # of the model
    rows: Sequence[int],  # of steps
    stopwatch: Stopwatch,
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Times one linear of each shape. Returns `Kernels` of what was timed, and what they gain, in
    words for the log; no words if CUTLASS stays everywhere."""
    layers = {shape_name(layer.weight): layer for layer in opened_fp8_linears(modules)}
    kernels: dict[str, dict[str, str]] = {}
    gains: list[float] = []
    for (shape, layer), number in itertools.product(layers.items(), rows):
        weight = layer.weight
        states = torch.randn(number, weight.shape[0], device=weight.device).to(FP8)
        ones = torch.ones(number, 1, device=weight.device)
        bias = getattr(layer, "bias", None)
        timed = Product(states, ones, weight, layer.weight_scale, bias, dtype)
        times = stopwatch.time_candidates(
            f"FP8 linears of {shape}, {number:,} rows",
            {name: partial(multiply, timed) for name, multiply in CANDIDATES.items()},
        )
        if times:
            best = kernels.setdefault(shape, {})[str(number)] = fastest(times)
            if best != CUTLASS:
                gains.append(times[CUTLASS] / times[best])
    if not gains:
        return kernels, []
    all_timed = sum(map(len, kernels.values()))
    words = f"{len(gains)} of {all_timed} FP8 linears {min(gains):.2f} to {max(gains):.2f} times"
    return kernels, [words]
