"""FlashAttention-4 with a causal flag for each request, as vLLM's copy takes them on Hopper for
layers without a window.

Legend: T queries in all, N requests, Hq query heads, Hkv key heads, D the head size.
"""

from collections.abc import Callable
from typing import Any

import torch

from attention_kernels.chunks import CHUNK


def attend_by_flags(
    query: torch.Tensor,  # [T, Hq, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: torch.Tensor,
    block_table: torch.Tensor,  # [N, max_blocks] int32
    query_start_loc: torch.Tensor,  # [N + 1] int32
    seq_lens: torch.Tensor,  # [N] int32
    causal: torch.Tensor,  # [N] int32
    *,
    output: torch.Tensor,  # [T, Hq, D]
    scale: float,
    softcap: float,
    max_query_len: int,  # tokens
    max_seq_len: int,  # tokens
    forward: Callable[..., Any],  # vLLM's `flash_attn_varlen_func` for FlashAttention-4
) -> None:
    """Writes attention's result to `output`."""
    forward(
        q=query,
        k=key_cache,
        v=value_cache,
        out=output,
        cu_seqlens_q=query_start_loc,
        seqused_k=seq_lens,
        block_table=block_table,
        max_seqlen_q=max(max_query_len, CHUNK),  # fewer would be another compile key
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        softcap=softcap,
        causal=True,  # where the request's flag says so
        dynamic_causal=causal,
    )
