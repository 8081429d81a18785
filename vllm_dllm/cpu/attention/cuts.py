"""Splits requests into ones that vLLM's CPU kernel can compute, which are causal or bidirectional.

A block of a block-causal request (`attention_kernels.masks`) sees all keys up to the block's end,
so each block becomes a bidirectional request that ends there. So do the rows of an image, which see
all keys up to its end. For a window that holds the whole image, the kernel's symmetric window is
right as well.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dllm.attention import WindowRules


def split_into_blocks(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Returns `common` with each block-causal request split into one bidirectional request per
    block, and with causal requests in place of verifying ones. Rows stay where they are. Returns
    `common` itself if all requests are causal or bidirectional."""
    causal = common.causal
    if not isinstance(causal, torch.Tensor) or 0 <= int(causal.min()) <= int(causal.max()) <= 1:
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
    return replace_requests(
        common,
        requests,
        query_start_loc=np.concatenate(([0], row_ends)),
        seq_lens=block_ends,
        causal=np.where(by_blocks, 0, causal != 0)[requests],
    )


def replace_requests(
    common: CommonAttentionMetadata,
    requests: np.ndarray,  # [n] int, of which request of `common` each of the n new ones is a part
    *,
    query_start_loc: np.ndarray,  # [n + 1] int
    seq_lens: np.ndarray,  # [n] int
    causal: np.ndarray,  # [n] 0 or 1
) -> CommonAttentionMetadata:
    """Returns `common` with its rows divided into n other requests."""
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


@dataclass(frozen=True)
class Image:
    """Rows of a batch that belong to one image."""

    request: int  # index of the new request
    rows: slice  # rows of the batch; fewer than its keys if the cache already holds the first ones
    first_key: int  # position
    end: int  # position after its last key


def split_at_images(
    common: CommonAttentionMetadata, rules: WindowRules
) -> tuple[CommonAttentionMetadata, WindowRules, list[Image]]:
    """Returns `common` with requests split into ones that are all image or have none, the window
    rules of the new requests, and the images. Rows stay where they are."""
    if rules.spans is None:
        return common, rules, []
    assert isinstance(common.causal, torch.Tensor) and rules.symmetric is not None
    num_reqs = common.num_reqs
    bounds = common.query_start_loc[: num_reqs + 1].numpy()
    num_rows = int(bounds[-1])
    spans = rules.spans[:num_rows].numpy()

    changes = np.flatnonzero((spans[1:] != spans[:-1]).any(axis=1)) + 1
    firsts = np.unique(np.concatenate((bounds[:-1], changes)))
    firsts = firsts[firsts < num_rows]  # where requests without rows begin
    row_ends = np.append(firsts[1:], num_rows)
    requests = np.searchsorted(bounds, firsts, side="right") - 1
    is_image = spans[firsts, 1] > 0
    rows_after = bounds[requests + 1] - row_ends
    seq_lens = common.seq_lens.numpy()[requests] - rows_after
    assert (seq_lens == spans[firsts, 1])[is_image].all(), "a step has the last row of its images"

    images = [
        Image(int(i), slice(int(firsts[i]), int(row_ends[i])), *map(int, spans[firsts[i]]))
        for i in np.flatnonzero(is_image)
    ]
    symmetric = np.where(is_image, 1, rules.symmetric.numpy()[requests])
    common = replace_requests(
        common,
        requests,
        query_start_loc=np.append(firsts, num_rows),
        seq_lens=seq_lens,
        causal=np.where(is_image, 0, common.causal.numpy()[requests]),
    )
    return common, replace(rules, symmetric=torch.from_numpy(symmetric.astype(np.int32))), images
