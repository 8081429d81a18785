"""Chunks: every query in one of them, all keys it sees and only pages of them, one band each. The
kernel that cuts runs in Triton's interpreter where there is no GPU; so FlashAttention-4's mask
function runs on the CPU, and it is compiled. Its numbers are in `test_kernels_gpu.py`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_kernels import chunks as chunks_module
from attention_kernels.chunks import CHUNK, Chunks
from attention_kernels.masks import block_spans, verifying_spans, visible, visible_range
from attention_kernels.testing import PagedBatch, Request, allowed, with_gaps
from tests.paths import ROOT
from tests.processes import output_of
from tests.unit.attention_kernels.batches import VERIFIED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


@pytest.mark.numerics
@pytest.mark.usefixtures("triton_version")
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


@pytest.mark.numerics
@pytest.mark.usefixtures("triton_version")
def test_verified_blocks() -> None:
    batch = verifying([request for request in VERIFIED if request.causal < 0])
    allowed(batch, scale=0.3).check(attend(batch, cut(batch, -1, most=16), 0.3))


@pytest.mark.numerics
@pytest.mark.usefixtures("triton_version")
def test_many_requests_and_the_padding_of_a_graph() -> None:
    batch = small_batch([Request(1 + r % 3, 7 * r, causal=r % 2 == 0) for r in range(64)])
    chunks = cut(batch, 20, padding=700)
    assert chunks.query_start_loc[-1] == len(batch.query), "padding is nobody's"
    allowed(batch, scale=0.3, window_left=20).check(attend(batch, chunks, 0.3))


@pytest.mark.numerics
@pytest.mark.usefixtures("triton_version")
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


SCRIPT = Path(__file__).parent / "compile_fa4.py"
TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def truth_table(chunks: Chunks, num_queries: int, num_keys: int) -> torch.Tensor:
    """[C, Q, K] bool: `band_mask`, or `image_mask` if there are images, as FlashAttention-4 would
    call it, run by CuTe on the CPU."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack
    from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    from attention_kernels.fa4_fwd import band_mask, image_mask

    mask = band_mask if chunks.images is None else image_mask

    @cute.jit
    def fill(bands: cute.Tensor, images: cute.Tensor, table: cute.Tensor):
        for chunk in range(table.shape[0]):
            for q in range(table.shape[1]):
                for k in range(table.shape[2]):
                    where = [scalar_to_ssa(i, cutlass.Int32) for i in (chunk, 0, q, k)]
                    seen = ssa_to_scalar(mask(*where, None, [bands, images]))
                    table[chunk, q, k] = cutlass.Int32(seen)

    table = torch.full((len(chunks.seq_lens), num_queries, num_keys), -1, dtype=torch.int32)
    images = chunks.bands if chunks.images is None else chunks.images
    fill(from_dlpack(chunks.bands), from_dlpack(images), from_dlpack(table))
    assert ((table == 0) | (table == 1)).all()
    return table == 1


@pytest.mark.slow
@pytest.mark.fa4
@pytest.mark.usefixtures("triton_version")
@pytest.mark.parametrize("window_left", [-1, 0, 11, 200])
@pytest.mark.parametrize("requests", [MIXED, WITH_IMAGES], ids=["text", "images"])
def test_mask_function(requests: list[Request], window_left: int) -> None:
    batch = PagedBatch.random(requests, num_heads=1, num_kv_heads=1, head_size=16, block_size=16)
    starts, lengths = batch.query_start_loc, batch.seq_lens
    chunks = cut(batch, window_left, most=16)
    table = truth_table(chunks, 16, int(chunks.seq_lens.max()))
    checked = 0
    for chunk, row in enumerate(chunks.query_start_loc[:-1].tolist()):
        num_rows = int(chunks.query_start_loc[chunk + 1]) - row
        if num_rows == 0:
            continue
        r = int(torch.searchsorted(starts, row, right=True)) - 1
        query_len = int(starts[r + 1] - starts[r])
        context_len = int(lengths[r]) - query_len
        num_keys = int(chunks.seq_lens[chunk])
        # The chunk's keys end where its last query's do, or at the request's end.
        first_page = int(chunks.block_table[chunk, 0])
        shift = 16 * batch.block_table[r].tolist().index(first_page)
        expected = visible(
            torch.arange(num_rows)[:, None] + context_len + row - int(starts[r]),
            torch.arange(num_keys) + shift,
            context_len,
            int(batch.causal[r]),
            window_left,
            bool(batch.symmetric[r]),
            None if batch.spans is None else batch.spans[row : row + num_rows, None],
        )
        assert torch.equal(table[chunk, :num_rows, :num_keys], expected)
        checked += num_rows
    assert checked == len(batch.query)


@pytest.mark.slow
@pytest.mark.fa4
@pytest.mark.usefixtures("triton_version")
@pytest.mark.parametrize("block", [4, 32])
def test_mask_function_of_blocks(block: int) -> None:
    """Masked models' requests: causal ones whose blocks are images."""
    queries, context = 40, 8
    requests = [Request(queries, context, causal=True), Request(block, 2 * block, causal=True)]
    batch = PagedBatch.random(requests, num_heads=1, num_kv_heads=1, head_size=16, block_size=16)
    positions = [torch.arange(r.query_len) + r.context_len for r in requests]
    chunks = cut(replace(batch, spans=block_spans(torch.cat(positions), block)), -1, most=16)
    table, checked = truth_table(chunks, 16, int(chunks.seq_lens.max())), 0
    for chunk, row in enumerate(chunks.query_start_loc[:-1].tolist()):
        num_rows = int(chunks.query_start_loc[chunk + 1]) - row
        if num_rows == 0:
            continue
        of_request = int(row >= queries)
        position = torch.cat(positions)[row : row + num_rows]
        num_keys = int(chunks.seq_lens[chunk])  # from position 0 on, without a window
        end = int(batch.seq_lens[of_request])
        last = (int(position[-1]) // block + 1) * block
        assert num_keys == min(last, end)
        expected = visible(position[:, None], torch.arange(num_keys), 0, block, window_left=-1)
        assert torch.equal(table[chunk, :num_rows, :num_keys], expected)
        checked += num_rows
    assert checked == len(batch.query)


@pytest.mark.slow
@pytest.mark.fa4
@pytest.mark.usefixtures("triton_version")
def test_mask_function_of_verified_blocks() -> None:
    """Their rows see their own key, and images that are the keys before."""
    request = Request(30, 33, causal=-16)
    chunks = cut(verifying([request]), -1, most=16)
    table = truth_table(chunks, 16, int(chunks.seq_lens.max()))
    rows = 0
    for chunk, row in enumerate(chunks.query_start_loc[:-1].tolist()):
        num_rows = int(chunks.query_start_loc[chunk + 1]) - row
        num_keys = int(chunks.seq_lens[chunk])
        position = request.context_len + row + torch.arange(num_rows)[:, None]
        expected = visible(position, torch.arange(num_keys), 33, -16, window_left=-1)
        assert torch.equal(table[chunk, :num_rows, :num_keys], expected)
        rows += num_rows
    assert rows == request.query_len


@pytest.mark.fa4
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "head_size", "group", "page"),
    [  # sliding layers of 26B, and layers of Qwen3
        (90, 256, 2, 16),
        (100, 256, 2, 128),
        pytest.param(100, 256, 2, 16, marks=pytest.mark.thorough),
        pytest.param(90, 128, 4, 32, marks=pytest.mark.thorough, id="masked, 90"),
        pytest.param(100, 128, 4, 128, marks=pytest.mark.thorough, id="masked, 100"),
    ],
)
def test_compiles(capability: int, head_size: int, group: int, page: int) -> None:
    arguments = (SCRIPT, capability, head_size, group, page)
    printed = output_of(*arguments, variables={"PYTHONPATH": str(ROOT)})
    ours, another, ours_again, with_images = json.loads(printed)
    for made in (ours, with_images):
        assert made[TENSOR_CORES[capability]] > 0 and made["ld.local"] == 0, made
    # Not for each block of keys and each pair of query and key.
    assert ours["ld.global.nc"] == 3, "the numbers of a chunk are loaded more than once"
    # Stock vLLM's causal tensor is not part of FlashAttention-4's key: what was compiled for a
    # fixed flag is taken for it. A mask function is.
    assert another[".entry"] == 1, "another mask was taken from the cache"
    assert ours_again[".entry"] == 0, "the same mask was compiled again"
    assert with_images[".entry"] == 1, "the mask without images was taken for that with them"


GAPPED = ["query", "output", "block_table", "query_start_loc", "seq_lens", "causal", "window_rule"]


@pytest.mark.fa4
@pytest.mark.parametrize("name", [*GAPPED, "spans"])
def test_gaps_along_a_last_dimension_are_refused(name: str) -> None:
    from attention_kernels import fa4_fwd

    batch = PagedBatch.random(
        WITH_IMAGES, num_heads=2, num_kv_heads=1, head_size=32, block_size=16, dtype=torch.float16
    )
    output = torch.zeros_like(batch.query)
    if name == "output":
        output = with_gaps(output)
    else:
        field = "symmetric" if name == "window_rule" else name
        batch = replace(batch, **{field: with_gaps(getattr(batch, field))})
    said = "impl 'fa4' takes contiguous spans, got strides"
    if name != "spans":
        said = f"a {name} that is contiguous along its last dimension"
    with pytest.raises(ValueError, match=said):
        fa4_fwd.attention(batch, output=output, scale=0.3, window_left=-1, softcap=0.0)
