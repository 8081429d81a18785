"""Times each version of attention in the layers of a model, in the form of `times/`."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from vllm_dllm.attention.choice import VERSIONS, Version
from vllm_dllm.attention.flash_attention import FlashAttention
from vllm_dllm.attention.gpu import GpuCanvasImpl
from vllm_dllm.attention.warm_up import make_probe, one_of_each_kind
from vllm_dllm.measured.stopwatch import Stopwatch

CONTEXTS = (0, 1024, 8192, 65536)  # tokens before each canvas


@torch.inference_mode()
def measure_attention(
    layers: Iterable[Any],  # of the model, with their caches; other layers are ignored
    dtype: torch.dtype,
    canvas_length: int,
    steps: Iterable[int],  # canvases of each
    longest: int,  # tokens of a request
    stopwatch: Stopwatch,
) -> list[dict[str, Any]]:
    """Times each kind of layer that more than one version can run, by rows and context. Returns
    `layers` of `Times`, without kinds that could not be timed. Overwrites the first pages
    of these layers' caches, which must hold nothing yet, with zeros, and has the layers choose
    versions again."""
    most_context = max(0, min(longest - canvas_length, CONTEXTS[-1]))
    contexts = [context for context in CONTEXTS if context <= most_context]
    cases = list(product(steps, contexts))
    measured = []
    for layer in one_of_each_kind(layers):
        impl, cells = layer.impl, []
        found = FlashAttention.find(impl.kind, dtype, impl.kv_cache_dtype)
        if isinstance(found, str):
            continue
        pages = layer.kv_cache[: -(-(most_context + canvas_length) // layer.kv_cache.shape[2])]
        pages.normal_()
        for canvases, context in cases:
            attend = make_probe(
                layer,
                num_reqs=canvases,
                length=canvas_length,
                context=context,
                longest=longest,
                dtype=dtype,
            )
            rows = canvases * canvas_length
            runs: dict[str, Callable[[], torch.Tensor]] = {
                version: partial(_run_version, impl, version, found, attend) for version in VERSIONS
            }
            what = f"attention of head size {impl.head_size}, {rows:,} rows behind {context:,}"
            if times := stopwatch.time_candidates(what, runs):
                cells.append({"rows": rows, "context": context, **times})
        pages.zero_()
        impl.choose_version()
        if cells:
            measured.append({**impl.kind._asdict(), "ms": cells})
    return measured


def describe_gains(measured: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns what FlashAttention-4 gains over Triton, in words for the log. `measured`: what
    `measure_attention` returned; kinds of layers without times of both are left out."""
    gains = []
    for layer in measured:
        cells = [cell for cell in layer["ms"] if set(VERSIONS) <= cell.keys()]
        if ratios := [cell["triton"] / cell["fa4"] for cell in cells]:
            gains.append(
                f"FlashAttention-4 at head size {layer['head_size']} {min(ratios):.2f} to "
                f"{max(ratios):.2f} times as fast as Triton"
            )
    return gains


def _run_version(
    impl: GpuCanvasImpl,
    version: Version,
    flash_attention: FlashAttention,
    attend: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Returns the result of `attend` with one version, and leaves that version forced."""
    impl.force_version(version, flash_attention)
    return attend()
