"""Paged attention with a causal flag per request and one- or two-sided windows, in Triton.

A program computes a tile of queries of one request, for the query heads that share a key head (as
many as the tile holds), over a share of the keys that the tile sees (split-KV). A second, small
kernel joins the shares. The grid depends only on shapes, so a captured CUDA graph stays valid
whatever the tensors hold at replay.

Legend: T queries in all, Hq / Hkv query / key heads, D head size, G = Hq / Hkv, S splits.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from attention_kernels.support import check_last_strides, shared_bytes
from attention_kernels.tiling import find_request, key_range

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 16
MIN_KEYS_PER_SPLIT = 256  # below this, joining costs more than parallel work gains
_SPARE_BYTES = 4096  # of shared memory, for what Triton itself adds


@dataclass(frozen=True)
class Tiles:
    """How the work is divided for one head size, group size and element size."""

    block_q: int  # queries per program
    heads: int  # heads of a group per program, a power of two: block_q * heads rows
    block_n: int  # keys per step
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, head_size: int, group: int, element_size: int, shared_memory: int) -> "Tiles":
        """The largest tile whose queries, keys and values fit `shared_memory` bytes."""
        bytes_a_row = triton.next_power_of_2(head_size) * element_size
        most_rows, num_stages = (128 if bytes_a_row <= 256 else 64), 2
        for rows, block_n in ((most_rows, 64), (most_rows, 32), (32, 32), (32, 16), (16, 16)):
            if bytes_a_row * (rows + 2 * num_stages * block_n) + _SPARE_BYTES <= shared_memory:
                break
        else:
            num_stages = 1
        heads = min(triton.next_power_of_2(group), rows)
        return cls(
            block_q=rows // heads,
            heads=heads,
            block_n=block_n,
            num_warps=8 if bytes_a_row > 128 and rows >= 64 else 4,
            num_stages=num_stages,
        )


def attention(
    query: torch.Tensor,  # [T, Hq, D] fp16, bf16 or fp32
    key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D] query's dtype or fp8 e4m3
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
    key_scale: torch.Tensor | None,  # [1] fp32
    value_scale: torch.Tensor | None,
    max_seq_len: int,
    num_splits: int | None = None,  # None: enough to fill the GPU
) -> None:
    """See `api.attention`, which checks the rest.

    Raises:
        ValueError: for a tensor that is not contiguous along its last dimension; for tensors that
            are not on a GPU; and for bf16 in Triton's interpreter, which multiplies it wrongly.
    """
    _check_device(query)
    check_last_strides(
        "triton",
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        causal=causal,
        window_rule=symmetric,
        output=output,
    )
    if len(query) == 0 or len(seq_lens) == 0:
        return
    cut = _Cut.choose(query, key_cache, len(seq_lens), window_left, max_seq_len, num_splits)
    partial_output = partial_lse = output  # unused unless the keys are split
    if cut.num_splits > 1:
        shape = (cut.num_splits, *query.shape[:2])
        partial_output = query.new_empty(*shape, query.shape[2], dtype=torch.float32)
        partial_lse = query.new_empty(shape, dtype=torch.float32)
    _attend(
        (query, key_cache, value_cache, block_table, query_start_loc, seq_lens, causal, symmetric),
        (key_scale, value_scale),
        (output, partial_output, partial_lse),
        cut,
        scale=scale,
        window_left=window_left,
        softcap=softcap,
    )
    if cut.num_splits > 1:
        _join(partial_output, partial_lse, output, query_start_loc, cut.num_reqs)


@dataclass(frozen=True)
class _Cut:
    """How one launch is cut up: into tiles of queries, heads of a tile, shares of the keys."""

    tiles: Tiles
    num_reqs: int
    num_tiles: int
    num_parts: int  # programs that share a key head
    num_splits: int

    @classmethod
    def choose(
        cls,
        query: torch.Tensor,  # [T, Hq, D]
        key_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
        num_reqs: int,
        window_left: int,
        max_seq_len: int,
        num_splits: int | None,
    ) -> "_Cut":
        num_tokens, num_heads, head_size = query.shape
        num_kv_heads = key_cache.shape[2]
        group = num_heads // num_kv_heads
        tiles = Tiles.choose(head_size, group, query.element_size(), _shared_memory(query.device))
        num_parts = triton.cdiv(group, tiles.heads)
        if num_splits is None:
            in_window = min(max_seq_len, window_left + num_tokens)
            num_keys = max_seq_len if window_left < 0 else in_window
            # Tiles with queries are at least so many; no request is expected to be empty.
            num_busy = max(num_tokens // tiles.block_q, num_reqs) * num_kv_heads * num_parts
            num_splits = _choose_splits(num_busy, num_keys, _num_processors(query.device))
        # A request of q queries has at most q // block_q + 1 tiles; see `find_request`.
        num_tiles = num_tokens // tiles.block_q + num_reqs
        return cls(tiles, num_reqs, num_tiles, num_parts, num_splits)


def _attend(
    inputs: tuple[torch.Tensor, ...],  # those of `attention`, from `query` to `symmetric`
    scales: tuple[torch.Tensor | None, torch.Tensor | None],  # of keys, of values
    outputs: tuple[torch.Tensor, ...],  # whole; of each share: partial, log-sum-exp
    cut: _Cut,
    *,
    scale: float,
    window_left: int,
    softcap: float,
) -> None:
    query, key_cache, value_cache, block_table = inputs[:4]
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    tiles = cut.tiles
    _attention_kernel[(cut.num_tiles, num_kv_heads * cut.num_parts, cut.num_splits)](
        *inputs,
        *(query if scale_of is None else scale_of for scale_of in scales),
        *outputs,
        cut.num_reqs,
        num_tokens,
        window_left,
        scale,
        softcap,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *outputs[0].stride()[:2],
        HQ=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=tiles.heads,
        PARTS=cut.num_parts,
        D=head_size,
        D_PADDED=triton.next_power_of_2(head_size),
        PAGE=block_size,
        BLOCK_Q=tiles.block_q,
        BLOCK_N=tiles.block_n,
        SPLITS=cut.num_splits,
        HAS_WINDOW=window_left >= 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_KEY_SCALE=scales[0] is not None,
        HAS_VALUE_SCALE=scales[1] is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _join(
    partial_output: torch.Tensor,  # [S, T, Hq, D] fp32
    partial_lse: torch.Tensor,  # [S, T, Hq] fp32
    output: torch.Tensor,  # [T, Hq, D]
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    num_reqs: int,
) -> None:
    num_splits, num_tokens, num_heads, head_size = partial_output.shape
    _join_kernel[(num_tokens, num_heads)](
        partial_output,
        partial_lse,
        output,
        query_start_loc,
        num_reqs,
        num_tokens,
        *output.stride()[:2],
        HQ=num_heads,
        D=head_size,
        D_PADDED=triton.next_power_of_2(head_size),
        SPLITS=num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
    )


def _check_device(query: torch.Tensor) -> None:
    interpreted = not isinstance(_attention_kernel, triton.runtime.JITFunction)
    if interpreted and query.dtype == torch.bfloat16:
        raise ValueError(
            "impl 'triton' takes float16 and float32 in Triton's interpreter, which multiplies "
            "bfloat16 wrongly, got query with torch.bfloat16: use another dtype, or a GPU without "
            "TRITON_INTERPRET"
        )
    if not interpreted and query.device.type != "cuda":
        raise ValueError(
            f"impl 'triton' takes tensors on a GPU, got query on {query.device}: move all tensors "
            f"to a GPU, pass impl='reference', which runs anywhere, or set TRITON_INTERPRET=1 "
            f"before Triton is imported"
        )


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a program may use; without a GPU, as many as on Hopper."""
    on_gpu = device.type == "cuda"
    return shared_bytes(torch.cuda.get_device_capability(device) if on_gpu else (9, 0))


@cache
def _num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; 1 for the interpreter, which runs programs in turn."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1


def _choose_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """How many shares to split the keys into: enough to give each processor a program, unless the
    shares would be too short. A power of two, because each number is compiled separately."""
    wanted = triton.next_power_of_2(triton.cdiv(num_processors, num_programs))
    possible = max(1, min(num_keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS))
    return min(wanted, 1 << (possible.bit_length() - 1))


@triton.jit
def _visible(
    query_pos, key_pos, context_len, causal, symmetric, window_left, HAS_WINDOW: tl.constexpr
):
    """`masks.visible` for a tile: query_pos [M, 1], key_pos [1, N]."""
    back = query_pos - key_pos
    block = max(causal, 1)
    before_end = key_pos < (query_pos // block + 1) * block
    if HAS_WINDOW:
        causal_rule = before_end & (back <= window_left)
        symmetric_rule = (back <= window_left) & (back >= -window_left)
        reference_rule = (key_pos >= context_len - window_left) & (query_pos >= 0)
        bidirectional = tl.where(symmetric != 0, symmetric_rule, reference_rule)
        seen = tl.where(causal != 0, causal_rule, bidirectional)
    else:
        seen = before_end | (causal == 0)
    return seen


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _attention_kernel(
    query,  # [T, Hq, D]
    key_cache,  # [num_blocks, page, Hkv, D]
    value_cache,  # [num_blocks, page, Hkv, D]
    block_table,  # [num_reqs, max_blocks] int32
    query_start_loc,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    causal,  # [num_reqs] int32
    symmetric,  # [num_reqs] int32
    key_scale,  # [1] fp32; unused without HAS_KEY_SCALE
    value_scale,  # [1] fp32
    output,  # [T, Hq, D]
    partial_output,  # [S, T, Hq, D] fp32; unused when SPLITS is 1
    partial_lse,  # [S, T, Hq] fp32, base-2 log of the sum of exponentials
    num_reqs,
    num_tokens,
    window_left,
    scale,
    softcap,
    query_stride_t,
    query_stride_h,
    key_stride_block,
    key_stride_page,
    key_stride_h,
    value_stride_block,
    value_stride_page,
    value_stride_h,
    table_stride,
    output_stride_t,
    output_stride_h,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEADS: tl.constexpr,  # of those, per program; a power of two
    PARTS: tl.constexpr,  # programs that share a key head
    D: tl.constexpr,
    D_PADDED: tl.constexpr,  # power of two
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # queries per program
    BLOCK_N: tl.constexpr,  # keys per step
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
):
    # Heads and slots are widened to 64 bits before they are multiplied by strides: a cache may
    # keep all pages of a head together.
    tile, part, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    key_head = part // PARTS
    request = find_request(query_start_loc, tile, num_reqs, BLOCK_Q)
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    first = (tile - (first_row // BLOCK_Q + request)) * BLOCK_Q  # query of the request
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    context_len = seq_len - query_len
    is_causal = tl.load(causal + request)
    is_symmetric = tl.load(symmetric + request)

    # Rows of the tile: query by query, and for each of them the heads of the group.
    lane = tl.arange(0, BLOCK_Q * HEADS)
    step = first + lane // HEADS
    group_head = part % PARTS * HEADS + lane % HEADS
    is_row = (step < query_len) & (group_head < GROUP)
    row = (first_row + step).to(tl.int64)
    head = key_head * GROUP + group_head
    channel = tl.arange(0, D_PADDED)
    is_channel = channel < D
    q = tl.load(
        query + (row * query_stride_t + head * query_stride_h)[:, None] + channel[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )
    query_pos = context_len + step

    last = min(first + BLOCK_Q, query_len) - 1
    start, end = key_range(
        context_len + first,
        context_len + last,
        context_len,
        seq_len,
        is_causal,
        is_symmetric,
        window_left,
    )
    first_tile = start // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    share = tl.cdiv(num_tiles, SPLITS)
    from_tile = first_tile + split * share
    to_tile = min(from_tile + share, first_tile + num_tiles)

    if HAS_KEY_SCALE:
        scale *= tl.load(key_scale)
    if not HAS_SOFTCAP:
        scale *= LOG2_E  # weights are powers of two
    table = block_table + request.to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_Q * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * HEADS], tl.float32)
    accumulated = tl.zeros([BLOCK_Q * HEADS, D_PADDED], tl.float32)
    for key_tile in range(from_tile, to_tile):
        key_pos = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # The pages before `start` may belong to another request by now and hold a NaN.
        in_range = (key_pos >= start) & (key_pos < end)
        if PAGE % BLOCK_N == 0:  # the tile lies in one page
            page = tl.load(table + key_tile * BLOCK_N // PAGE).to(tl.int64)
        else:
            page = tl.load(table + key_pos // PAGE, mask=in_range, other=0).to(tl.int64)
        slot = (key_pos % PAGE).to(tl.int64)
        k = tl.load(
            key_cache
            + (page * key_stride_block + slot * key_stride_page + key_head * key_stride_h)[None, :]
            + channel[:, None],
            mask=in_range[None, :] & is_channel[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh by way of exp2, which every backend has
            e = tl.exp2(tl.abs(scores / softcap) * (-2 * LOG2_E))
            tanh = (1 - e) / (1 + e)
            scores = tl.where(scores < 0, -tanh, tanh) * softcap * LOG2_E
        seen = _visible(
            query_pos[:, None],
            key_pos[None, :],
            context_len,
            is_causal,
            is_symmetric,
            window_left,
            HAS_WINDOW,
        )
        scores = tl.where(seen & in_range[None, :], scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # For a row that has seen no key yet, any finite number will do.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - safe_maximum[:, None])
        decay = tl.exp2(maximum - safe_maximum)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(
            value_cache
            + (page * value_stride_block + slot * value_stride_page + key_head * value_stride_h)[
                :, None
            ]
            + channel[None, :],
            mask=in_range[:, None] & is_channel[None, :],
            other=0.0,
        )
        accumulated = accumulated * decay[:, None] + tl.dot(
            weights.to(q.dtype), v.to(q.dtype), input_precision="ieee"
        )
        maximum = new_maximum

    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if HAS_VALUE_SCALE:
        result *= tl.load(value_scale)
    mask = is_row[:, None] & is_channel[None, :]
    if SPLITS == 1:
        tl.store(
            output + (row * output_stride_t + head * output_stride_h)[:, None] + channel[None, :],
            result.to(output.dtype.element_ty),
            mask=mask,
        )
    else:
        flat = (split.to(tl.int64) * num_tokens + row) * HQ + head
        tl.store(partial_output + flat[:, None] * D + channel[None, :], result, mask=mask)
        lse = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + flat, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _join_kernel(
    partial_output,  # [S, T, Hq, D] fp32
    partial_lse,  # [S, T, Hq] fp32
    output,  # [T, Hq, D]
    query_start_loc,  # [num_reqs + 1] int32
    num_reqs,
    num_tokens,
    output_stride_t,
    output_stride_h,
    HQ: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if row >= tl.load(query_start_loc + num_reqs):
        return  # padding of a CUDA graph, which belongs to no request
    split = tl.arange(0, SPLITS_PADDED)
    flat = (split.to(tl.int64) * num_tokens + row) * HQ + head
    lse = tl.load(partial_lse + flat, mask=split < SPLITS, other=float("-inf"))
    maximum = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weights, 0)
    channel = tl.arange(0, D_PADDED)
    parts = tl.load(
        partial_output + flat[:, None] * D + channel[None, :],
        mask=(split < SPLITS)[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        output + row * output_stride_t + head * output_stride_h + channel,
        result.to(output.dtype.element_ty),
        mask=channel < D,
    )
