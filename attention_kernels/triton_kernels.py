"""The Triton kernel of `triton_fwd`. Legend: T queries in all, Hq / Hkv query / key heads, D head
size, G = Hq / Hkv, S splits, M rows of a tile.

A launch has room for S shares of the keys. How many a tile makes of its keys it finds out on the
device, so that a short context is not cut up for the longest one that a captured graph may meet.
The program that finishes its share last joins them: it finds in `arrivals` that the others have
come. A share is written before its program arrives, and read after, in the memory order of
PyTorch Inductor's grid barrier (`torch/_inductor/runtime/triton_helpers.py`, `x_grid_barrier`).

Where a product feeds another one, Triton gives each warp rows of its own; and with fewer rows than
the warps take, they repeat each other's work. With few rows (`LAGS`), a pass of the loop therefore
multiplies the queries by the keys of one tile, and the weights of the tile before by its values:
then neither product feeds the other, and the warps share keys and channels, too.
"""

import triton
import triton.language as tl

from attention_kernels.tiling import find_request, images, key_range, with_images

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _visible(
    query_pos,
    context_len,
    seq_len,
    causal,
    symmetric,
    window_left,
    HAS_WINDOW: tl.constexpr,
    VERIFIES: tl.constexpr,
):
    """First key and end of the keys that each query [M] sees, by `masks.visible`. Worked out once:
    in the loop, a mask is then two comparisons. With VERIFIES, each query sees its own key, too."""
    block = max(causal, 1)
    end = tl.where(causal != 0, tl.minimum((query_pos // block + 1) * block, seq_len), seq_len)
    if VERIFIES:
        verified = max(-causal, 1)  # tokens of the block
        is_copy = (causal < 0) & (query_pos >= (context_len // verified + 1) * verified)
        end = tl.where(is_copy, query_pos - verified, end)
    start = tl.zeros_like(query_pos)
    if HAS_WINDOW:
        moves = (causal != 0) | (symmetric != 0)  # the window moves with the query
        start = tl.maximum(tl.where(moves, query_pos, context_len) - window_left, 0)
        ahead = (causal == 0) & (symmetric != 0)
        end = tl.where(ahead, tl.minimum(query_pos + window_left + 1, seq_len), end)
    return start, end


@triton.jit
def _tile(table, key_tile, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions [N] of a tile's keys, which of them are within start..end, their pages (or the one
    of all) and their slots in these."""
    key_pos = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # The pages before `start` may belong to another request by now and hold a NaN.
    in_range = (key_pos >= start) & (key_pos < end)
    if PAGE % BLOCK_N == 0:  # the tile lies in one page
        first = key_tile * BLOCK_N
        page = tl.load(table + first // PAGE, mask=first < end, other=0).to(tl.int64)
    else:
        page = tl.load(table + key_pos // PAGE, mask=in_range, other=0).to(tl.int64)
    return key_pos, in_range, page, (key_pos % PAGE).to(tl.int64)


@triton.jit
def _weighted_values(
    weights,  # [M, N]
    values,  # of the key head
    stride_block,
    stride_page,
    page,
    slot,
    is_key,  # [N] bool
    channel,
    is_channel,
):
    v = tl.load(
        values + (page * stride_block + slot * stride_page)[:, None] + channel[None, :],
        mask=is_key[:, None] & is_channel[None, :],
        other=0.0,
    )
    return tl.dot(weights, v.to(weights.dtype), input_precision="ieee")


@triton.jit
def _weighted_values_of_tile(
    weights,
    values,
    stride_block,
    stride_page,
    table,
    key_tile,
    from_tile,  # there is nothing before
    start,
    end,
    channel,
    is_channel,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    _, in_range, page, slot = _tile(table, max(key_tile, from_tile), start, end, PAGE, BLOCK_N)
    is_key = in_range & (key_tile >= from_tile)
    return _weighted_values(
        weights, values, stride_block, stride_page, page, slot, is_key, channel, is_channel
    )


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
    spans,  # [T, 2] int32, first key and end of each query's image; None, which is no argument of
    # the compiled kernel: there are no images
    key_scale,  # [1] fp32; unused without HAS_KEY_SCALE
    value_scale,  # [1] fp32
    output,  # [T, Hq, D]
    partial_output,  # [S, T, Hq, D] fp32; unused when SPLITS is 1, as are the next two
    partial_lse,  # [S, T, Hq] fp32, base-2 log of the sum of exponentials
    arrivals,  # [tiles * key heads * PARTS] int32, zero before and after
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
    LAGS: tl.constexpr,  # values are added one pass after their keys
    SPLITS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,  # steps of a share of the keys, unless there are fewer
    HAS_WINDOW: tl.constexpr,
    VERIFIES: tl.constexpr,  # `causal` may be negative
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
    seen_from, seen_end = _visible(
        context_len + step,
        context_len,
        seq_len,
        is_causal,
        is_symmetric,
        window_left,
        HAS_WINDOW,
        VERIFIES,
    )
    if spans is not None:
        image_start, image_end = images(spans, row, is_row, seq_len)
        seen_from = tl.minimum(seen_from, image_start)
        seen_end = tl.maximum(seen_end, image_end)

    last = min(first + BLOCK_Q, query_len) - 1
    start, end = key_range(
        context_len + first,
        context_len + last,
        context_len,
        seq_len,
        is_causal,
        is_symmetric,
        window_left,
        VERIFIES,
    )
    if spans is not None:
        start, end = with_images(start, end, image_start, image_end)
    first_tile = start // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    share = num_tiles
    shares = 1
    if SPLITS > 1:
        share = max(tl.cdiv(num_tiles, SPLITS), LEAST_SHARE)
        shares = max(tl.cdiv(num_tiles, share), 1)
        if split >= shares:
            return
    from_tile = first_tile + split * share
    to_tile = min(from_tile + share, first_tile + num_tiles)

    channel = tl.arange(0, D_PADDED)
    is_channel = channel < D
    q = tl.load(
        query + (row * query_stride_t + head * query_stride_h)[:, None] + channel[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )
    if HAS_KEY_SCALE:
        scale *= tl.load(key_scale)
    if not HAS_SOFTCAP:
        scale *= LOG2_E  # weights are powers of two
    table = block_table + request.to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_Q * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * HEADS], tl.float32)
    accumulated = tl.zeros([BLOCK_Q * HEADS, D_PADDED], tl.float32)
    # Of the tile before, whose values the coming pass adds: none at first.
    weights = tl.zeros([BLOCK_Q * HEADS, BLOCK_N], q.dtype)
    decay = tl.full([BLOCK_Q * HEADS], 1.0, tl.float32)
    keys = key_cache + key_head * key_stride_h
    values = value_cache + key_head * value_stride_h
    for key_tile in range(from_tile, to_tile):
        key_pos, in_range, page, slot = _tile(table, key_tile, start, end, PAGE, BLOCK_N)
        k = tl.load(
            keys + (page * key_stride_block + slot * key_stride_page)[None, :] + channel[:, None],
            mask=in_range[None, :] & is_channel[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if LAGS:
            accumulated = accumulated * decay[:, None] + _weighted_values_of_tile(
                weights,
                values,
                value_stride_block,
                value_stride_page,
                table,
                key_tile - 1,
                from_tile,
                start,
                end,
                channel,
                is_channel,
                PAGE,
                BLOCK_N,
            )
        if HAS_SOFTCAP:
            # tanh by way of exp2, which every backend has
            e = tl.exp2(tl.abs(scores / softcap) * (-2 * LOG2_E))
            tanh = (1 - e) / (1 + e)
            scores = tl.where(scores < 0, -tanh, tanh) * softcap * LOG2_E
        seen = key_pos[None, :] < seen_end[:, None]
        if HAS_WINDOW:
            seen &= key_pos[None, :] >= seen_from[:, None]
        if VERIFIES:
            seen |= key_pos[None, :] == (context_len + step)[:, None]
        scores = tl.where(seen, scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # For a row that has seen no key yet, any finite number will do.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        exact_weights = tl.exp2(scores - safe_maximum[:, None])
        decay = tl.exp2(maximum - safe_maximum)
        total = total * decay + tl.sum(exact_weights, 1)
        weights = exact_weights.to(q.dtype)
        maximum = new_maximum
        if not LAGS:
            accumulated = accumulated * decay[:, None] + _weighted_values(
                weights,
                values,
                value_stride_block,
                value_stride_page,
                page,
                slot,
                in_range,
                channel,
                is_channel,
            )
    if LAGS:
        accumulated = accumulated * decay[:, None] + _weighted_values_of_tile(
            weights,
            values,
            value_stride_block,
            value_stride_page,
            table,
            to_tile - 1,
            from_tile,
            start,
            end,
            channel,
            is_channel,
            PAGE,
            BLOCK_N,
        )

    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if HAS_VALUE_SCALE:
        result *= tl.load(value_scale)
    mask = is_row[:, None] & is_channel[None, :]
    to_rows = output + row * output_stride_t + head * output_stride_h
    if shares == 1:
        tl.store(to_rows[:, None] + channel[None, :], result.to(output.dtype.element_ty), mask=mask)
    elif SPLITS > 1:
        flat = row * HQ + head
        shares_apart = num_tokens.to(tl.int64) * HQ
        mine = split * shares_apart + flat
        tl.store(partial_output + mine[:, None] * D + channel[None, :], result, mask=mask)
        lse = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + mine, lse, mask=is_row)
        tl.debug_barrier()  # all threads have written before one of them says so
        mine_arrives = arrivals + tile * tl.num_programs(1) + part
        if tl.atomic_add(mine_arrives, 1, sem="acq_rel", scope="gpu") == shares - 1:
            tl.store(mine_arrives, 0)  # for the next launch
            _join(
                partial_output,
                partial_lse,
                to_rows,
                flat,
                is_row,
                shares,
                shares_apart,
                BLOCK_Q * HEADS,
                D,
                D_PADDED,
            )


@triton.jit
def _join(
    partial_output,
    partial_lse,
    to_rows,  # [M] pointers to the output's rows
    flat,  # [M] numbers of the rows in a share
    is_row,  # [M]
    shares,
    shares_apart,  # from a row of a share to the same of the next one
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    """Always in the same order, whoever comes last. Four shares are read at once: one program waits
    for what it reads, and few have this to do."""
    CHANNELS: tl.constexpr = min(D_PADDED, 64)  # at once, or registers run out
    maximum = tl.full([M], float("-inf"), tl.float32)
    for share in range(0, shares, 4):
        one = _lse(partial_lse, share, shares, shares_apart, flat, is_row)
        two = _lse(partial_lse, share + 1, shares, shares_apart, flat, is_row)
        three = _lse(partial_lse, share + 2, shares, shares_apart, flat, is_row)
        four = _lse(partial_lse, share + 3, shares, shares_apart, flat, is_row)
        largest = tl.maximum(tl.maximum(one, two), tl.maximum(three, four))
        maximum = tl.maximum(maximum, largest)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    for first in range(0, D_PADDED, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        mask = is_row[:, None] & (channel < D)[None, :]
        places = flat[:, None] * D + channel[None, :]
        total = tl.zeros([M], tl.float32)
        result = tl.zeros([M, CHANNELS], tl.float32)
        for share in range(0, shares, 4):
            one = _part(partial_output, share, shares, shares_apart * D, places, mask)
            two = _part(partial_output, share + 1, shares, shares_apart * D, places, mask)
            three = _part(partial_output, share + 2, shares, shares_apart * D, places, mask)
            four = _part(partial_output, share + 3, shares, shares_apart * D, places, mask)
            w = tl.exp2(_lse(partial_lse, share, shares, shares_apart, flat, is_row) - maximum)
            x = tl.exp2(_lse(partial_lse, share + 1, shares, shares_apart, flat, is_row) - maximum)
            y = tl.exp2(_lse(partial_lse, share + 2, shares, shares_apart, flat, is_row) - maximum)
            z = tl.exp2(_lse(partial_lse, share + 3, shares, shares_apart, flat, is_row) - maximum)
            total += w + x + y + z
            result += one * w[:, None] + two * x[:, None]
            result += three * y[:, None] + four * z[:, None]
        result /= tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            to_rows[:, None] + channel[None, :],
            result.to(to_rows.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def _lse(partial_lse, share, shares, shares_apart, flat, is_row):
    """[M] of a share, past the caches of this processor: other ones have written it."""
    return tl.load(
        partial_lse + share * shares_apart + flat,
        mask=is_row & (share < shares),
        other=float("-inf"),
        cache_modifier=".cg",
    )


@triton.jit
def _part(partial_output, share, shares, shares_apart, places, mask):
    return tl.load(
        partial_output + share * shares_apart + places,
        mask=mask & (share < shares),
        other=0.0,
        cache_modifier=".cg",
    )
