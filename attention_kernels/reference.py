"""The definition of right: paged variable-length attention in plain PyTorch, request by request."""

import torch

from attention_kernels.batch import Batch
from attention_kernels.masks import visible


def attention(
    batch: Batch,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,  # 0 = none
    key_scale: torch.Tensor | None = None,  # [1] fp32, of an fp8 cache; None = 1
    value_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,  # [T, Hq, D], written at the rows of requests
) -> torch.Tensor:
    """Returns attention's output [T, Hq, D] in the query's dtype, written to `output` if it is
    given. A query that sees no key gives zeros. Waits for the device."""
    query = batch.query
    if output is None:
        output = torch.zeros_like(query)
    block_size = batch.key_cache.shape[1]
    group = query.shape[1] // batch.key_cache.shape[2]  # query heads per key head
    for i in range(len(batch.seq_lens)):
        rows = slice(int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1]))
        seq_len, query_len = int(batch.seq_lens[i]), rows.stop - rows.start
        if query_len == 0:
            continue
        key_pos = torch.arange(seq_len, device=query.device)
        pages = batch.block_table[i, key_pos // block_size].long()
        keys = batch.key_cache[pages, key_pos % block_size].to(query.dtype)
        values = batch.value_cache[pages, key_pos % block_size].to(query.dtype)
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
            causal=int(batch.causal[i]),
            window_left=window_left,
            symmetric=bool(batch.symmetric[i]),
            spans=batch.spans[rows, None] if batch.spans is not None else None,
        )
        probs = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", probs, values)
    return output
