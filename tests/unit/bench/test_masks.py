"""Which blocks of keys need a mask."""

import pytest
import torch

from attention_kernels import chunks as chunks_module
from attention_kernels.chunks import Chunks
from attention_kernels.interpreter import interpret_kernels
from attention_kernels.testing import PagedBatch, Request
from bench.lease import masks
from bench.lease.masks import KEYS, PAGE, TILES

REQUESTS = [
    Request(256, 3000),  # behind the window: its first key lies within a page
    Request(256, 100),
    Request(30, 0, causal=True),
    Request(300, 2500, causal=True),
    Request(60, 2000, symmetric=True),
]


@pytest.fixture
def chunks() -> Chunks:
    interpret_kernels(chunks_module)
    batch = PagedBatch.random(REQUESTS, num_heads=2, num_kv_heads=1, head_size=32, block_size=PAGE)
    return Chunks.cut(
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.causal,
        batch.symmetric,
        num_tokens=len(batch.query),
        block_size=PAGE,
        window_left=masks.WINDOW,
    )


def test_each_block_is_in_the_right_list(chunks: Chunks) -> None:
    blocks = masks.list_blocks(chunks)
    whole_found = 0
    for chunk, (slope, low, high) in enumerate(chunks.bands.tolist()):
        num_keys, num_rows = int(chunks.seq_lens[chunk]), int(chunks.query_start_loc.diff()[chunk])
        ahead = torch.arange(num_keys) - slope * torch.arange(num_rows)[:, None]
        parts = ((ahead >= low) & (ahead <= high)).split(KEYS, dim=1) if num_keys else ()
        whole = [block for block, seen in enumerate(parts) if seen.all()]
        masked = [block for block, seen in enumerate(parts) if seen.any() and not seen.all()]
        for tile in range(TILES):
            at = int(blocks.tiles_before[chunk]) + tile
            first = int(blocks.listed_before[chunk]) + tile * -(-num_keys // KEYS)
            for expected, counts, lists in (
                (whole, blocks.whole_count, blocks.whole),
                (masked, blocks.masked_count, blocks.masked),
            ):
                count = int(counts[0, at])
                assert lists[0, first : first + count].tolist() == expected
        whole_found += len(whole)
    assert whole_found > 30


def test_a_canvas_needs_a_mask_where_its_keys_begin(chunks: Chunks) -> None:
    counts = masks.list_blocks(chunks).masked_count[0, ::TILES]
    assert counts[0] == 1, "behind the window"
    first_of_second_request = 2
    assert counts[first_of_second_request] == 0, "no window yet"
