"""Compiles attention kernels before requests come. Each takes seconds, and vLLM's own warm-up has
neither a step of a long prompt nor every number of rows."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attention_kernels.chunks import CHUNK
from vllm_dllm.attention.choice import Choice, LayerKind
from vllm_dllm.attention.gpu import GpuCanvasImpl, GpuCanvasMetadata


def compile_attention(
    layers: Iterable[Any],  # of the model, with their caches; other layers are ignored
    dtype: torch.dtype,
    most_rows: int,  # of a step
    longest: int,  # tokens of a request
    has_images: bool,  # whether requests may have some: masks of images are another kernel
) -> None:
    """Runs a layer of each kind in steps that together compile every kernel it may run. Must be
    called after the versions of attention are chosen."""
    for layer in one_of_each_kind(layers):
        for num_reqs, length in steps_to_try(layer.impl.choice, most_rows):
            for images in {False, has_images}:
                run_layer = make_probe(
                    layer,
                    num_reqs=num_reqs,
                    length=length,
                    context=0,
                    longest=longest,
                    dtype=dtype,
                    has_images=images,
                )
                run_layer()


def one_of_each_kind(layers: Iterable[Any]) -> list[Any]:
    """Returns the first layer of each kind among those that run our attention."""
    kinds: dict[LayerKind, Any] = {}
    for layer in layers:
        if isinstance(getattr(layer, "impl", None), GpuCanvasImpl):
            kinds.setdefault(layer.impl.kind, layer)
    return list(kinds.values())


def steps_to_try(choice: Choice, most_rows: int) -> Iterator[tuple[int, int]]:
    """Yields steps that together compile every kernel of a choice, as a number of requests and a
    number of queries of each.

    Triton is compiled for each number of shares of the keys. These are powers of two, and a step of
    twice the rows has half as many shares. FlashAttention-4 splits the keys of few rows, in a
    kernel of its own.
    """
    begins = [begin for begin, _ in choice.steps if begin <= most_rows]
    ends = [*begins[1:], most_rows + 1]
    for begin, end, (_, version) in zip(begins, ends, choice.steps, strict=False):
        if version == "fa4":
            for rows in {begin, end - 1}:
                yield max(1, rows // CHUNK), CHUNK
            continue
        rows = max(1, begin)
        while rows < end:
            yield 1, rows
            rows *= 2
        yield 1, end - 1


def make_probe(
    layer: Any,  # an attention layer with its cache, [num_blocks, Hkv, block_size, 2 * D]
    *,
    num_reqs: int,
    length: int,  # queries of a request
    context: int,  # tokens before them
    longest: int,  # tokens of the longest request, which CUDA graphs are captured for
    dtype: torch.dtype,
    has_images: bool = False,
) -> Callable[[], torch.Tensor]:
    """Returns a function that runs a layer in a step of canvases that belong to no request.

    The function returns [num_reqs * length, Hq, D], the same tensor each time. All its requests
    read the cache's first pages. Nothing is written to the cache.
    """
    impl, cache = layer.impl, layer.kv_cache
    num_blocks, _, page, _ = cache.shape
    rows, flags = num_reqs * length, cache.new_zeros(num_reqs, dtype=torch.int32)
    longest = max(longest, context + length)
    pages = torch.arange(-(-longest // page), dtype=torch.int32, device=cache.device)
    metadata = GpuCanvasMetadata(
        num_actual_tokens=rows,
        max_query_len=length,
        query_start_loc=torch.arange(0, rows + 1, length, dtype=torch.int32, device=cache.device),
        seq_lens=flags + context + length,
        max_seq_len=longest,
        block_table=(pages % num_blocks).repeat(num_reqs, 1),
        causal=flags,
        by_blocks=False,
        symmetric=flags,
        spans=flags.new_zeros(rows, 2) if has_images else None,
    )
    query = torch.randn(rows, impl.num_heads, impl.head_size, device=cache.device).to(dtype)
    output = torch.empty_like(query)

    @torch.inference_mode()
    def attend() -> torch.Tensor:
        impl.forward(layer, query, query, query, cache, metadata, output)
        return output

    return attend
