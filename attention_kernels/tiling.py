"""Which request a tile of queries belongs to, and the keys it sees, in Triton."""

import triton
import triton.language as tl

FAR = tl.constexpr(1 << 30)  # beyond any position


@triton.jit
def find_request(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr):
    """The request that owns `tile`. Request r owns the tiles from start[r] // BLOCK_Q + r on, which
    gives each request at least ceil(query_len / BLOCK_Q) tiles."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def key_range(
    first_query,
    last_query,
    context_len,
    seq_len,
    causal,
    symmetric,
    window_left,
    VERIFIES: tl.constexpr,  # `causal` may be negative
):
    """First key and end of the keys that the queries first..last see: `masks.visible_range`."""
    start = 0
    end = seq_len
    if causal != 0:
        block = causal
        if VERIFIES:
            block = max(causal, 1)  # a row that verifies sees its own key, the last one
        end = (last_query // block + 1) * block
        if window_left >= 0:
            start = first_query - window_left
    elif window_left >= 0:
        if symmetric != 0:
            start = first_query - window_left
            end = last_query + window_left + 1
        else:
            start = context_len - window_left
    return max(start, 0), min(end, seq_len)


@triton.jit
def images(spans, row, is_row, seq_len):
    """First key and end of the keys of the image that each row's token belongs to: FAR and 0 for
    other rows, so that the minimum and the maximum with them change nothing."""
    first = tl.load(spans + 2 * row, mask=is_row, other=0)
    end = tl.load(spans + 2 * row + 1, mask=is_row, other=0)
    return tl.where(end > 0, first, FAR), tl.minimum(end, seq_len)


@triton.jit
def with_images(start, end, image_start, image_end):
    """`key_range` of a tile, widened to the images of its rows."""
    return min(start, tl.min(image_start, 0)), max(end, tl.max(image_end, 0))
