"""Compiles FlashAttention-4 before requests come: a kernel takes seconds, and vLLM's own warm-up
has no step of a long prompt."""

from collections.abc import Iterable
from typing import Any

import torch

from attention_kernels.chunks import CHUNK
from vllm_dllm.attention.gpu import GpuCanvasImpl, GpuCanvasMetadata


@torch.inference_mode()
def compile_flash_attention(
    layers: Iterable[Any],  # of the model, with their caches; those that do not attend are ignored
    dtype: torch.dtype,
    most_rows: int,  # of a step
    longest: int,  # tokens of a request
    has_images: bool,  # whether requests may have some: masks of images are another kernel
) -> None:
    """Runs a layer of each kind that has FlashAttention-4, in the least step that runs it and in
    the largest: the keys of few rows are split, which is another kernel."""
    kinds = {}
    for layer in layers:
        impl = getattr(layer, "impl", None)
        if isinstance(impl, GpuCanvasImpl) and impl.least_rows_of_fa4 is not None:
            kinds[impl.head_size, impl.sliding_window] = layer
    for layer in kinds.values():
        least_rows = layer.impl.least_rows_of_fa4
        for rows in {least_rows, most_rows}:
            _attend(layer, max(1, rows // CHUNK), longest, dtype)
        if has_images:
            _attend(layer, max(1, least_rows // CHUNK), longest, dtype, has_images)


def _attend(
    layer: Any, num_reqs: int, longest: int, dtype: torch.dtype, has_images: bool = False
) -> None:
    """Canvases without a context, all in the first page."""
    impl, cache = layer.impl, layer.kv_cache
    _, _, page, _ = cache.shape  # [num_blocks, Hkv, block_size, 2 * D]
    rows, flags = num_reqs * CHUNK, cache.new_zeros(num_reqs, dtype=torch.int32)
    num_pages = -(-max(longest, CHUNK) // page)
    metadata = GpuCanvasMetadata(
        num_actual_tokens=rows,
        max_query_len=CHUNK,
        query_start_loc=torch.arange(0, rows + 1, CHUNK, dtype=torch.int32, device=cache.device),
        seq_lens=flags + CHUNK,
        max_seq_len=max(longest, CHUNK),
        block_table=flags.new_zeros(num_reqs, num_pages),
        slot_mapping=flags,  # nothing is written
        causal=flags,
        by_blocks=False,
        symmetric=flags,
        spans=flags.new_zeros(rows, 2) if has_images else None,
    )
    query = torch.zeros(rows, impl.num_heads, impl.head_size, dtype=dtype, device=cache.device)
    impl.forward(layer, query, query, query, cache, metadata, torch.empty_like(query))
