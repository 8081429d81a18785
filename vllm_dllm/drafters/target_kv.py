"""A target's own keys and values, read from its paged cache for a drafter that attends to them.

Most drafters make their context from the target's hidden states (`context_kv`). Those that take the
target's keys and values instead want them contiguous and in their own type, whatever the cache
holds: plain, or fp8 with the scales vLLM multiplies with when it reads.

Legend: T tokens of all requests together, N key heads, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PagedKV(NamedTuple):
    """One layer's cache; for vLLM's fp8 caches, which are uint8, a view as float8_e4m3fn."""

    keys: Tensor  # [num_blocks, block_size, N, D], any strides
    values: Tensor  # like keys
    key_scale: Tensor | None = None  # [1] or [N] fp32, of fp8 caches
    value_scale: Tensor | None = None


class ContiguousKV(NamedTuple):
    """Requests one after the other, the tokens of each in order."""

    keys: Tensor  # [T, N, D]
    values: Tensor  # [T, N, D]
    start_loc: Tensor  # [num_reqs + 1] int64, where each request starts


def read_target_kv(
    cache: PagedKV,
    block_table: Tensor,  # [num_reqs, max_blocks] int32
    seq_lens: Tensor,  # [num_reqs] int32: committed tokens, never with unverified drafts
    num_tokens: int,  # sum of seq_lens, which the host knows; no sync happens here
    dtype: torch.dtype,
) -> ContiguousKV:
    block_size = cache.keys.shape[1]
    start_loc = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
    requests = torch.arange(len(seq_lens), device=seq_lens.device)
    request = requests.repeat_interleave(seq_lens, output_size=num_tokens)  # [T]
    position = torch.arange(num_tokens, device=seq_lens.device) - start_loc[request]
    block = block_table[request, position // block_size].long()
    offset = position % block_size
    return ContiguousKV(
        _dequantised(cache.keys[block, offset], cache.key_scale, dtype),
        _dequantised(cache.values[block, offset], cache.value_scale, dtype),
        start_loc,
    )


def _dequantised(
    stored: Tensor,  # [T, N, D]
    scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if scale is None:
        return stored.to(dtype)
    return (stored.float() * scale.view(-1, 1)).to(dtype)
