"""Tiles of the Triton attention: what holds for every GPU, head size and group.

What the compiler makes of them at the 26B model's shapes is in `attention_kernels/CODEGEN.md`.
"""

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from attention_kernels.support import FIRST_FP8_CAPABILITY, TRITON_HEAD_SIZES, shared_bytes
from attention_kernels.tiles import Tiles

CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
REGISTERS = 128  # of a thread's 255, for its share of the results


def is_any(capability: tuple[int, int], element_size: int, cache_element_size: int) -> bool:
    """Whether the Triton version supports it."""
    fp8 = cache_element_size == 1
    return cache_element_size == element_size or (fp8 and capability >= FIRST_FP8_CAPABILITY)


@given(
    capability=st.sampled_from(CAPABILITIES),
    head_size=st.sampled_from(TRITON_HEAD_SIZES),
    group=st.integers(1, 256),
    element_size=st.sampled_from([2, 4]),
    has_fp8_cache=st.booleans(),
)
def test_tiles_fit_and_nobody_repeats_work(
    capability: tuple[int, int], head_size: int, group: int, element_size: int, has_fp8_cache: bool
) -> None:
    cache_element_size = 1 if has_fp8_cache else element_size
    if not is_any(capability, element_size, cache_element_size):
        return
    tiles = Tiles.choose(head_size, group, element_size, cache_element_size, capability)
    rows, keys, num_warps = tiles.block_q * tiles.heads, tiles.block_n, tiles.num_warps
    padded = triton.next_power_of_2(head_size)
    assert rows >= 16 and rows.bit_count() == 1
    assert keys >= 16 and keys.bit_count() == 1
    assert tiles.heads == min(triton.next_power_of_2(group), rows)
    # Queries, keys and values of each stage in flight, weights. `cp.async` fills a buffer anew.
    of_groups = capability[0] in (9, 10)
    buffers = tiles.num_stages if of_groups else 1
    channels = rows * element_size + 2 * buffers * keys * cache_element_size
    assert padded * channels + rows * keys * element_size <= shared_bytes(capability)
    assert rows * padded / (32 * num_warps) <= REGISTERS
    if element_size == 2 and of_groups:
        assert rows >= 64, "fewer rows are multiplied by the units of older GPUs"
    elif element_size == 2:
        # Rows of its own for each warp, or keys of its own.
        assert not tiles.lags or keys >= 8 * num_warps


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_head_more_in_the_group_changes_no_tile_but_its_own(capability: tuple[int, int]) -> None:
    """A tile holds heads of a group, padded to a power of two, as many as it has rows."""
    tiles = [Tiles.choose(256, group, 2, 2, capability) for group in (3, 4)]
    assert tiles[0] == tiles[1]
