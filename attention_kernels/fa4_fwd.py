"""The same attention by FlashAttention-4 (package flash-attn-4), on Hopper and Blackwell.

FlashAttention-4 has one causal flag and one window a launch, but takes a mask function with
tensors of its own. So the batch is cut into chunks (`chunks.py`), which keeps the skipping of keys
that no query sees, and `band_mask` masks inside of each. The function's hash is part of
FlashAttention-4's compile key, so no other variant is taken for it.
"""

import cutlass.cute as cute
import torch
from cutlass import Int32
from flash_attn.cute.interface import _flash_attn_fwd  # unlike the public one, it takes `out`
from flash_attn.cute.utils import scalar_to_ssa

from attention_kernels.chunks import CHUNK, Chunks


@cute.jit
def band_mask(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """low <= k - slope * q <= high, of the chunk."""
    bands, chunk = aux_tensors[0], batch_idx[0]  # [C, 3]
    slope = scalar_to_ssa(bands[chunk, 0], Int32)
    low = scalar_to_ssa(bands[chunk, 1], Int32)
    high = scalar_to_ssa(bands[chunk, 2], Int32)
    ahead = kv_idx - slope * q_idx
    return (ahead >= low) & (ahead <= high)


def attention(
    query: torch.Tensor,  # [T, Hq, D] fp16 or bf16
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D] query's dtype
    value_cache: torch.Tensor,  # like key_cache
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32
    causal: torch.Tensor,  # [num_reqs] int32
    *,
    symmetric: torch.Tensor,  # [num_reqs] int32
    output: torch.Tensor,  # [T, Hq, D], written at the rows of requests
    scale: float,
    window_left: int,
    softcap: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `api.attention`, which checks the rest.

    Raises:
        ValueError: for scales, which only an fp8 cache has.
    """
    for name, tensor in (("key_scale", key_scale), ("value_scale", value_scale)):
        if tensor is not None:
            raise ValueError(f"impl 'fa4' takes no {name}: it reads caches of the query's dtype")
    chunks = Chunks.cut(
        block_table,
        query_start_loc,
        seq_lens,
        causal,
        symmetric,
        num_tokens=len(query),
        block_size=key_cache.shape[1],
        window_left=window_left,
    )
    attend_chunks(query, key_cache, value_cache, chunks, output, scale, softcap)


def attend_chunks(
    query: torch.Tensor,  # [T, Hq, D]
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: torch.Tensor,
    chunks: Chunks,
    output: torch.Tensor,  # [T, Hq, D]
    scale: float,
    softcap: float,
) -> None:
    """FlashAttention-4 over chunks, which it takes for requests."""
    _flash_attn_fwd(
        query,
        key_cache,
        value_cache,
        cu_seqlens_q=chunks.query_start_loc,
        seqused_k=chunks.seq_lens,
        page_table=chunks.block_table,
        max_seqlen_q=min(CHUNK, len(query)),
        max_seqlen_k=chunks.block_table.shape[1] * key_cache.shape[1],
        softmax_scale=scale,
        softcap=softcap,
        mask_mod=band_mask,
        aux_tensors=[chunks.bands],
        out=output,
    )
