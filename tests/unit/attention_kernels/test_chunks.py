"""Chunks: every query in one of them, all keys it sees and only pages of them, one band each.

The kernel that cuts runs in Triton's interpreter where there is no GPU.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_kernels import chunks as chunks_module
from attention_kernels.chunks import CHUNK, Chunks
from attention_kernels.masks import verifying_spans, visible, visible_range
from attention_kernels.testing import PagedBatch, Request, allowed
from tests.unit.attention_kernels.batches import VERIFIED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("triton_version")]

MIXED = [
    Request(8, 37),
    Request(8, 37, symmetric=True),
    Request(8, 37, causal=True),
    Request(0, 12),
    Request(21, 50, symmetric=True),
    Request(1, 0, causal=True),
    Request(40, 90, causal=True),
    Request(30, 2),
]
WITH_IMAGES = [
    *MIXED,
    Request(40, 90, causal=True, images=((90, 95), (97, 130))),  # in several chunks
    Request(16, 16, causal=True, images=((16, 32),)),
    Request(20, 0, causal=True, images=((0, 7), (7, 19))),
]


def small_batch(requests: list[Request], block_size: int = 16) -> PagedBatch:
    return PagedBatch.random(
        requests, num_heads=2, num_kv_heads=1, head_size=32, block_size=block_size
    )


def cut(batch: PagedBatch, window_left: int, padding: int = 0, most: int = CHUNK) -> Chunks:
    """The batch's chunks, of at most so many queries each."""
    padded = replace(batch, query=F.pad(batch.query, (0, 0, 0, 0, 0, padding)))
    with pytest.MonkeyPatch.context() as patch:  # modules imported meanwhile keep it
        patch.setattr(chunks_module, "CHUNK", most)
        chunks = Chunks.cut(padded.to(DEVICE), window_left)
    tensors = vars(chunks).items()
    return Chunks(**{name: tensor.cpu() for name, tensor in tensors if tensor is not None})


def seen_in(chunks: Chunks, chunk: int, num_rows: int) -> torch.Tensor:
    """[num_rows, keys] bool, by the chunk's band and its rows' images."""
    k, rows = torch.arange(int(chunks.seq_lens[chunk])), torch.arange(num_rows)[:, None]
    slope, low, high = chunks.bands[chunk].tolist()
    ahead = k - slope * rows
    seen = (ahead >= low) & (ahead <= high)
    if chunks.images is not None:
        first, end = chunks.images[chunk, :num_rows, :, None].unbind(1)
        seen |= (k >= first) & (k < end)
    return seen


def attend(batch: PagedBatch, chunks: Chunks, scale: float) -> torch.Tensor:
    """What a kernel makes of chunks that takes them for requests, and of what each row sees."""
    output = torch.zeros_like(batch.query)
    block_size, num_kv_heads = batch.key_cache.shape[1:3]
    group = batch.query.shape[1] // num_kv_heads
    for chunk, length in enumerate(chunks.seq_lens.tolist()):
        rows = slice(*chunks.query_start_loc[chunk : chunk + 2].tolist())
        k = torch.arange(length)
        pages = chunks.block_table[chunk, k // block_size].long()
        keys, values = (
            cache[pages, k % block_size].repeat_interleave(group, dim=1)
            for cache in (batch.key_cache, batch.value_cache)
        )
        seen = seen_in(chunks, chunk, rows.stop - rows.start)
        scores = torch.einsum("qhd,khd->hqk", batch.query[rows], keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("window_left", [-1, 0, 11, 200])
@pytest.mark.parametrize("requests", [MIXED, WITH_IMAGES], ids=["text", "images"])
def test_attention_by_chunks(requests: list[Request], window_left: int, block_size: int) -> None:
    batch = small_batch(requests, block_size)
    output = attend(batch, cut(batch, window_left, most=16), 0.3)
    allowed(batch, scale=0.3, window_left=window_left).check(output)


def verifying(requests: list[Request]) -> PagedBatch:
    """A batch of requests that verify, with the spans that FlashAttention-4 wants."""
    batch = small_batch(requests)
    spans = [
        verifying_spans(
            torch.arange(request.context_len, request.context_len + request.query_len),
            torch.tensor(request.context_len),
            -request.causal,
        )
        for request in requests
    ]
    return replace(batch, spans=torch.cat(spans))


def test_verified_blocks() -> None:
    batch = verifying([request for request in VERIFIED if request.causal < 0])
    allowed(batch, scale=0.3).check(attend(batch, cut(batch, -1, most=16), 0.3))


def test_many_requests_and_the_padding_of_a_graph() -> None:
    batch = small_batch([Request(1 + r % 3, 7 * r, causal=r % 2 == 0) for r in range(64)])
    chunks = cut(batch, 20, padding=700)
    assert chunks.query_start_loc[-1] == len(batch.query), "padding is nobody's"
    allowed(batch, scale=0.3, window_left=20).check(attend(batch, chunks, 0.3))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    query_len=st.integers(0, 70),
    before=st.integers(0, 40),
    context_len=st.integers(0, 300),
    causal=st.booleans(),
    symmetric=st.booleans(),
    window_left=st.integers(-1, 90),
    block_size=st.sampled_from([16, 32]),
    image=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_no_page_in_vain(
    query_len: int,
    before: int,
    context_len: int,
    causal: bool,
    symmetric: bool,
    window_left: int,
    block_size: int,
    image: tuple[float, float] | None,  # where it begins and ends, of what it may cover
) -> None:
    request = Request(query_len, context_len, causal, symmetric)
    if image is not None and query_len > 0:
        least = max(context_len - window_left, 0) if window_left >= 0 else 0
        first = least + int(image[0] * (request.context_len + query_len - 1 - least))
        end = first + 1 + int(image[1] * (request.context_len + query_len - 1 - first))
        request = request._replace(images=((first, end),))
    batch = small_batch([Request(before, 3), request], block_size)
    chunks = cut(batch, window_left, most=16)
    starts = chunks.query_start_loc.tolist()
    assert starts[0] == 0 and starts[-1] == before + query_len
    num_rows = 0
    for chunk in range(len(chunks.seq_lens)):
        first, end = starts[chunk] - before, starts[chunk + 1] - before
        if first < 0 or first == end:  # the other request's, or empty
            assert first < 0 or chunks.seq_lens[chunk] == 0
            continue
        assert end - first <= 16
        num_rows += end - first
        positions = torch.tensor(context_len + first), torch.tensor(context_len + end - 1)
        seq_len = context_len + query_len
        spans = request.spans()[first:end]
        start, stop = visible_range(
            *positions, context_len, seq_len, causal, window_left, symmetric, spans
        )
        shift = int(start) // block_size * block_size
        length = int(stop) - shift
        assert chunks.seq_lens[chunk] == length
        pages = batch.block_table[1, shift // block_size :][: -(-length // block_size)]
        assert torch.equal(chunks.block_table[chunk, : len(pages)], pages)
        seen = visible(
            torch.arange(*(int(p) + i for i, p in enumerate(positions)))[:, None],
            torch.arange(length) + shift,
            context_len,
            causal,
            window_left,
            symmetric,
            spans[:, None],
        )
        assert torch.equal(seen_in(chunks, chunk, end - first), seen)
    assert num_rows == query_len
