"""FlashAttention-4 where there is no GPU: its mask function, run on the CPU, and what it compiles
to. Its numbers are in `test_kernels_gpu.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_kernels.chunks import Chunks
from attention_kernels.masks import block_spans, visible
from attention_kernels.testing import PagedBatch, Request, with_gaps
from tests.paths import ROOT
from tests.processes import output_of
from tests.unit.attention_kernels.test_chunks import MIXED, WITH_IMAGES, cut, verifying

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
