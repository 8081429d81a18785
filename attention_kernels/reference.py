"""The definition of right: paged variable-length attention in plain PyTorch, request by request."""

import torch

from attention_kernels.masks import visible


def attention(
    query: torch.Tensor,  # [T, Hq, D], the queries of all requests, one after the other
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int, page of each block of a request
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int, first row of each request
    seq_lens: torch.Tensor,  # [num_reqs] int, context and queries together
    causal: torch.Tensor,  # [num_reqs] int, see `masks`
    scale: float,
    window_left: int = -1,
    symmetric: torch.Tensor | None = None,  # [num_reqs] int, 1 = symmetric rule; None: reference
    spans: torch.Tensor | None = None,  # [T, 2] int, first key and end of each query's image
    softcap: float = 0.0,  # 0 = none
    key_scale: torch.Tensor | None = None,  # [1] fp32, of an fp8 cache; None = 1
    value_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,  # [T, Hq, D], written at the rows of requests
) -> torch.Tensor:
    """Returns attention's output [T, Hq, D] in the query's dtype, written to `output` if it is
    given. A query that sees no key gives zeros. The cache must already hold the queries' own keys
    and values. Waits for the device."""
    if output is None:
        output = torch.zeros_like(query)
    block_size = key_cache.shape[1]
    group = query.shape[1] // key_cache.shape[2]  # query heads per key head
    for i in range(len(seq_lens)):
        rows = slice(int(query_start_loc[i]), int(query_start_loc[i + 1]))
        seq_len, query_len = int(seq_lens[i]), rows.stop - rows.start
        if query_len == 0:
            continue
        key_pos = torch.arange(seq_len, device=query.device)
        pages = block_table[i, key_pos // block_size].long()
        keys = key_cache[pages, key_pos % block_size].to(query.dtype)
        values = value_cache[pages, key_pos % block_size].to(query.dtype)
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if key_scale is not None:
            keys = keys * key_scale.to(query.dtype)
        if value_scale is not None:
            values = values * value_scale.to(query.dtype)
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        mask = visible(
            query_pos=key_pos[seq_len - query_len :, None],
            key_pos=key_pos[None, :],
            context_len=seq_len - query_len,
            causal=int(causal[i]),
            window_left=window_left,
            symmetric=symmetric is not None and bool(symmetric[i]),
            spans=spans[rows, None] if spans is not None else None,
        )
        probs = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", probs, values)
    return output
