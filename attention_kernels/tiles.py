"""Chooses the tiles of the Triton attention for each kind of GPU.

They depend on what multiplies. On Hopper (wgmma) groups of four warps multiply, on data-centre
Blackwell (tcgen05) one thread for all warps; both read queries and keys from shared memory.
Elsewhere (mma) each warp multiplies what its own registers hold, which bounds the tiles of wide
heads before the shared memory does. `CODEGEN.md` shows the result for each chip.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton

from attention_kernels.support import shared_bytes

_SPARE_BYTES = 4096  # of shared memory, for what Triton itself adds
_OF_GROUPS = (9, 10)  # major capabilities of wgmma and tcgen05


class _Size(NamedTuple):
    """The size of a tile, and how many of its loads are on their way at once."""

    rows: int  # queries times heads
    keys: int
    num_stages: int


# For mma in 16 bits, by padded head size and bytes of a key's element. Four warps, and 99 KiB of
# shared memory, which every GPU has. With 64 rows each warp has rows of its own; with fewer, the
# warps share the keys, 8 for each (Triton cuts both products alike), and the channels. Keys of an
# fp8 cache pass through registers to become the queries' type, which costs rows.
_OF_WARPS = {
    (256, 2): _Size(32, 32, 2),
    (256, 1): _Size(32, 32, 2),
    (512, 2): _Size(32, 32, 2),
    (512, 1): _Size(16, 32, 2),
}
_ON_AMPERE = {  # and Ada, where these do not spill; on consumer Blackwell they do
    (256, 2): _Size(64, 32, 2),
    (512, 2): _Size(32, 32, 3),
}


@dataclass(frozen=True)
class Tiles:
    """How the work is divided for one head size, group size and element size."""

    block_q: int  # queries per program
    heads: int  # heads of a group per program, a power of two: block_q * heads rows
    block_n: int  # keys per step
    num_warps: int
    num_stages: int

    @property
    def lags(self) -> bool:
        """Returns whether values are added one pass after their keys, see `triton_kernels`."""
        return self.block_q * self.heads < 16 * self.num_warps

    @classmethod
    def choose(
        cls,
        head_size: int,
        group: int,  # query heads a key head
        element_size: int,  # of the query, in bytes
        cache_element_size: int,  # in bytes
        capability: tuple[int, int],  # compute capability of the GPU
    ) -> "Tiles":
        """Returns the largest tile whose queries, keys and values fit the shared memory, and whose
        results fit the registers."""
        padded = triton.next_power_of_2(head_size)
        num_warps = 4
        if element_size == 2 and padded >= 256 and capability[0] not in _OF_GROUPS:
            sizes = _OF_WARPS | (_ON_AMPERE if capability[0] == 8 else {})
            rows, block_n, num_stages = sizes[padded, cache_element_size]
        else:
            rows, block_n, num_stages = _largest_fitting_size(
                padded, element_size, cache_element_size, capability
            )
            num_warps = 8 if padded * element_size > 128 and rows >= 64 else 4
        heads = min(triton.next_power_of_2(group), rows)
        return cls(rows // heads, heads, block_n, num_warps, num_stages)


def _largest_fitting_size(
    padded: int, element_size: int, cache_element_size: int, capability: tuple[int, int]
) -> _Size:
    """Returns the largest tile that fits the shared memory. `padded`: the head size, rounded up to
    a power of two. Element sizes are in bytes."""
    bytes_a_row = padded * element_size
    of_groups = capability[0] in _OF_GROUPS and element_size == 2
    # Two warp groups of Hopper take 128 rows: with 64, both would compute the scores of all. On
    # Blackwell, 64 rows take as long as 128.
    most_rows = 128 if bytes_a_row <= (512 if of_groups else 256) else 64
    most_keys = 64
    if of_groups and bytes_a_row > 256 and cache_element_size < element_size:
        most_keys = 32  # they pass through registers to become the queries' type
    sizes = ((most_rows, most_keys), (most_rows, 32), (32, 32), (32, 16), (16, 16))
    available = shared_bytes(capability) - _SPARE_BYTES
    for rows, keys in sizes:
        if bytes_a_row * (rows + 2 * 2 * keys) <= available:
            return _Size(rows, keys, num_stages=2)
    return _Size(rows, keys, num_stages=1)
