"""Cuts a batch into chunks of queries, each with only the keys it sees, for kernels that know
neither per-request flags nor windows.

A chunk is up to `CHUNK` queries of one request and the pages from the first key that any of them
sees to the last. The kernel takes it for a sequence, and so skips all other keys. Inside a chunk,
query row q sees key k iff `low <= k - slope * q <= high`, or the image that the row belongs to
holds the key. Rows of a request that verifies see their own key by the former, and all others by
the latter.

Legend: N requests, T queries in all, C chunks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention_kernels.batch import Batch
from attention_kernels.tiling import FAR, find_request, images, key_range, with_images

CHUNK = 256  # queries; a canvas of the 26B model is one chunk


@dataclass(frozen=True)
class Chunks:
    """The chunks of a batch, as arguments of a kernel. All tensors are int32. Chunks without
    queries have no keys."""

    query_start_loc: torch.Tensor  # [C + 1]
    seq_lens: torch.Tensor  # [C] keys, from the start of the first page
    block_table: torch.Tensor  # [C, P]
    bands: torch.Tensor  # [C, 3] slope, low, high
    images: torch.Tensor | None = None  # [C, CHUNK, 2] first key and end of each row's image, as
    # keys of the chunk, with no keys for other rows; None: there are no images

    @classmethod
    def allocate(cls, batch: Batch, window_left: int) -> "Chunks":
        """Returns chunks whose tensors are not set yet. The shapes depend only on those of `batch`
        and on the window, so a CUDA graph can capture what uses them."""
        table = batch.block_table
        block_size = batch.key_cache.shape[1]
        num_tokens = len(batch.query)
        num_reqs, num_pages = table.shape
        num_chunks = num_tokens // CHUNK + num_reqs  # see `tiling.find_request`
        if window_left >= 0:
            # A request's queries and what the first of them sees, wherever its pages start.
            num_pages = min(num_pages, triton.cdiv(window_left + num_tokens, block_size) + 1)
        spans = batch.spans
        return cls(
            query_start_loc=table.new_empty(num_chunks + 1),
            seq_lens=table.new_empty(num_chunks),
            block_table=table.new_empty(num_chunks, num_pages),
            bands=table.new_empty(num_chunks, 3),
            images=None if spans is None else spans.new_empty(num_chunks, CHUNK, 2),
        )

    @classmethod
    def cut(cls, batch: Batch, window_left: int) -> "Chunks":
        """Returns the chunks of a batch, cut in one small kernel."""
        chunks = cls.allocate(batch, window_left)
        num_chunks, num_pages = chunks.block_table.shape
        _cut_kernel[(num_chunks,)](
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.causal,
            batch.symmetric,
            batch.spans,
            chunks.query_start_loc,
            chunks.seq_lens,
            chunks.block_table,
            chunks.bands,
            chunks.images,
            len(batch.block_table),
            num_chunks,
            num_pages,
            window_left,
            batch.block_table.stride(0),
            CHUNK=CHUNK,
            PAGE=batch.key_cache.shape[1],
            PAGES_A_STEP=128,
        )
        return chunks


@triton.jit(do_not_specialize=["num_reqs", "num_chunks", "num_pages"])
def _cut_kernel(
    block_table,
    query_start_loc,
    seq_lens,
    causal,
    symmetric,
    spans,  # [T, 2], or None
    chunk_start_loc,  # [C + 1]
    chunk_seq_lens,  # [C]
    chunk_block_table,  # [C, num_pages]
    bands,  # [C, 3]
    chunk_images,  # [C, CHUNK, 2], or None
    num_reqs,
    num_chunks,
    num_pages,
    window_left,
    table_stride,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_A_STEP: tl.constexpr,
):
    chunk = tl.program_id(0)
    request = find_request(query_start_loc, chunk, num_reqs, CHUNK)
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    first = min((chunk - (first_row // CHUNK + request)) * CHUNK, query_len)
    num_rows = min(query_len - first, CHUNK)
    tl.store(chunk_start_loc + chunk, first_row + first)
    if chunk == num_chunks - 1:  # it always belongs to the last request
        tl.store(chunk_start_loc + num_chunks, first_row + query_len)

    seq_len = tl.load(seq_lens + request)
    context_len = seq_len - query_len
    first_pos = context_len + first
    is_causal = tl.load(causal + request)
    is_symmetric = tl.load(symmetric + request)
    start, end = key_range(
        first_pos,
        first_pos + num_rows - 1,
        context_len,
        seq_len,
        is_causal,
        is_symmetric,
        window_left,
        VERIFIES=True,
    )
    if spans is not None:
        row = tl.arange(0, CHUNK)
        image_start, image_end = images(spans, first_row + first + row, row < num_rows, seq_len)
        start, end = with_images(start, end, image_start, image_end)
    first_page = start // PAGE
    shift = first_page * PAGE  # position of the chunk's key 0
    num_keys = max(end - shift, 0)
    if num_rows == 0:
        num_keys = 0
    tl.store(chunk_seq_lens + chunk, num_keys)

    slope = 0
    low = -FAR
    high = FAR
    if is_causal != 0:
        slope = 1
        high = first_pos - shift
        if is_causal < 0:
            low = high
        elif window_left >= 0:
            low = first_pos - shift - window_left
    elif window_left >= 0:
        if is_symmetric != 0:
            slope = 1
            low = first_pos - shift - window_left
            high = first_pos - shift + window_left
        else:
            low = context_len - shift - window_left
    tl.store(bands + 3 * chunk, slope)
    tl.store(bands + 3 * chunk + 1, low)
    tl.store(bands + 3 * chunk + 2, high)
    if spans is not None:
        to_images = chunk_images + 2 * (chunk * CHUNK + row)
        tl.store(to_images, image_start - shift)
        tl.store(to_images + 1, image_end - shift)

    used = tl.cdiv(num_keys, PAGE)
    from_table = block_table + request.to(tl.int64) * table_stride + first_page
    to_table = chunk_block_table + chunk.to(tl.int64) * num_pages
    for step in range(0, num_pages, PAGES_A_STEP):
        column = step + tl.arange(0, PAGES_A_STEP)
        page = tl.load(from_table + column, mask=column < used, other=0)
        tl.store(to_table + column, page, mask=column < num_pages)
