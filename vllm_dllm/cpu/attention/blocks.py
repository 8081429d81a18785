"""Requests that are causal by blocks (`attention_kernels.masks`), for vLLM's CPU kernel.

It knows causal and bidirectional requests. Seen from one block, all keys up to the block's end are
visible, so each block becomes a bidirectional request that ends there.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def cut_into_blocks(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The same rows, with a flag per request of 0 or 1. Unchanged where all are that already."""
    if not isinstance(common.causal, torch.Tensor) or int(common.causal.max()) <= 1:
        return common
    num_reqs = common.num_reqs
    bounds = common.query_start_loc[: num_reqs + 1].numpy().astype(np.int64)
    causal = common.causal[:num_reqs].numpy().astype(np.int64)
    ends = common.seq_lens[:num_reqs].numpy().astype(np.int64)
    firsts = ends - np.diff(bounds)  # positions of the requests' first rows

    # A request that is not by blocks is one block of its own.
    by_blocks = causal > 1
    size = np.where(by_blocks, causal, ends + 1)
    first_blocks = firsts // size
    num_blocks = np.maximum((ends - 1) // size, first_blocks) - first_blocks + 1
    requests = np.repeat(np.arange(num_reqs), num_blocks)
    nth = np.arange(len(requests)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    block_ends = np.minimum((first_blocks[requests] + nth + 1) * size[requests], ends[requests])
    row_ends = bounds[requests] + block_ends - firsts[requests]
    return cut(
        common,
        requests,
        query_start_loc=np.concatenate(([0], row_ends)),
        seq_lens=block_ends,
        causal=np.where(by_blocks, 0, causal)[requests],
    )


def cut(
    common: CommonAttentionMetadata,
    requests: np.ndarray,  # [n] int, of which request of `common` each of the n new ones is a part
    *,
    query_start_loc: np.ndarray,  # [n + 1] int
    seq_lens: np.ndarray,  # [n] int
    causal: np.ndarray,  # [n] 0 or 1
) -> CommonAttentionMetadata:
    """The same rows as n requests."""
    starts = torch.from_numpy(query_start_loc.astype(np.int32))
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        num_reqs=len(requests),
        max_query_len=int(starts.diff().max()),
        block_table_tensor=common.block_table_tensor[torch.from_numpy(requests)],
        causal=torch.from_numpy(causal.astype(np.int32)),
    )
