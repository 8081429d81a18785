"""A step of canvases that belong to nobody, for a layer to run before requests come."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_dllm.attention.gpu import GpuCanvasMetadata


def probe(
    layer: Any,  # an attention layer with its cache, [num_blocks, Hkv, block_size, 2 * D]
    num_reqs: int,
    length: int,  # queries of a request
    context: int,  # tokens before them
    longest: int,  # tokens of the longest request, which CUDA graphs are captured for
    dtype: torch.dtype,
    has_images: bool = False,
) -> Callable[[], torch.Tensor]:
    """Attends, and returns [num_reqs * length, Hq, D], the same tensor each time. All requests read
    the same pages, the cache's first; nothing is written there."""
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
        slot_mapping=flags,
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
