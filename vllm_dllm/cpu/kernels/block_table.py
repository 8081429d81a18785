"""Native versions of the kernels of `block_table.py` and `buffer_utils.py` of
`vllm/v1/worker/gpu`.

Block tables arrive as addresses, one per KV-cache group, of int32 arrays [max_num_reqs, stride].
"""

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch


def gather_block_tables(
    grid: tuple[int, ...],  # (num_groups, num_reqs_padded)
    batch_idx_to_req_idx: torch.Tensor,  # [num_reqs] int64
    src_block_table_ptrs: torch.Tensor,  # [num_groups] uint64
    dst_block_table_ptrs: torch.Tensor,  # [num_groups] uint64, tables written
    block_table_strides: torch.Tensor,  # [num_groups] int64
    num_blocks: torch.Tensor,  # [num_groups, max_num_reqs] int32, blocks each request has
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,  # [max_num_reqs] int32
    sliding_window_reach: torch.Tensor | None = None,  # [num_groups] int32 tokens back, 0 = all
    block_sizes: torch.Tensor | None = None,  # [num_groups] int32
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Writes the block table rows of the batch's requests to each group's table for the step, and 0
    to its padding rows.

    `MASK_SLIDING_WINDOW`: also writes 0 for blocks that no query of the step sees, which may be
    another request's by now.
    """
    num_rows, max_slots = grid[1], num_blocks.shape[1]
    slots = batch_idx_to_req_idx.tolist()
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        used = num_blocks.numpy()[group]
        table = int32_at(sources[group], max_slots, stride)
        rows = int32_at(targets[group], num_rows, stride)
        for row, slot in enumerate(slots):
            rows[row, : used[slot]] = table[slot, : used[slot]]
        rows[num_reqs:] = 0
        if not MASK_SLIDING_WINDOW:
            continue
        assert num_computed_tokens is not None
        assert sliding_window_reach is not None and block_sizes is not None
        if (reach := int(sliding_window_reach[group])) > 0:
            unseen = num_computed_tokens.numpy()[slots] - reach
            blocks = np.maximum(unseen, 0) // int(block_sizes[group])
            for row, (count, slot) in enumerate(zip(blocks, slots, strict=True)):
                rows[row, : min(count, used[slot])] = 0


def compute_slot_mappings(
    grid: tuple[int, ...],  # (num_groups, num_reqs + 1)
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [num_reqs] int64, -1 = a dummy that owns no blocks
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    pos: torch.Tensor,  # [num_tokens] int64
    block_table_ptrs: torch.Tensor,  # [num_groups] uint64
    block_table_strides: torch.Tensor,  # [num_groups] int64
    block_sizes: torch.Tensor,  # [num_groups] int32
    slot_mapping_enabled: torch.Tensor,  # [num_groups] bool
    slot_mappings: torch.Tensor,  # [num_groups, max_num_tokens] int64, written
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Writes the KV cache slot of each token to `slot_mappings`. Writes `PAD_ID` beyond the batch,
    for dummy requests, and in groups that have no slot mapping."""
    assert CP_SIZE == 1, "vLLM has no context parallelism on CPUs"
    slots, bounds = idx_mapping.tolist(), query_start_loc.tolist()
    num_tokens, num_slots = bounds[grid[1] - 1], max(slots) + 1
    positions = pos.numpy()[:num_tokens]
    places = {}  # by block size, which most groups share: block in the request, offset in the block
    addresses, strides = block_table_ptrs.tolist(), block_table_strides.tolist()
    sizes, enabled = block_sizes.tolist(), slot_mapping_enabled.tolist()
    for group, mapping in enumerate(slot_mappings.numpy()):
        mapping[num_tokens if enabled[group] else 0 : max_num_tokens] = PAD_ID
        if not enabled[group]:
            continue
        if (block_size := sizes[group]) not in places:
            places[block_size] = np.divmod(positions, block_size)
        blocks, offsets = places[block_size]
        table = int32_at(addresses[group], num_slots, strides[group])
        for row, slot in enumerate(slots):
            begin, end = bounds[row], bounds[row + 1]
            if slot < 0:
                mapping[begin:end] = PAD_ID
                continue
            in_table = table[slot].take(blocks[begin:end])
            np.multiply(in_table, block_size, out=mapping[begin:end])
            mapping[begin:end] += offsets[begin:end]


def apply_write(
    grid: tuple[int, ...],  # (num_writes, parts of the longest); the second since 0.33
    output: torch.Tensor,  # the array written to; with groups: [num_groups] uint64 addresses
    output_stride: int | torch.Tensor,  # elements per row; with groups: [num_groups] int64
    write_indices: torch.Tensor,  # [num_writes] int32, row
    write_starts: torch.Tensor,  # [num_writes] int32, first column
    write_contents: torch.Tensor,  # the values of all writes, one after the other
    write_cu_lens: torch.Tensor,  # [num_writes] int32, end of each write in `write_contents`
    write_group_ids: torch.Tensor | None,  # [num_writes] int32
    MULTI_GROUP: bool,
) -> None:
    """Writes runs of values into rows of `output`, an array of any type. `MULTI_GROUP`: writes them
    into one int32 array per KV cache group, at the addresses in `output`."""
    num_writes = grid[0]
    contents = write_contents.numpy()
    rows = write_indices.tolist()[:num_writes]
    starts = write_starts.tolist()[:num_writes]
    ends = write_cu_lens.tolist()[:num_writes]
    if MULTI_GROUP:
        assert write_group_ids is not None and isinstance(output_stride, torch.Tensor)
        addresses, strides = output.tolist(), output_stride.tolist()
        groups = write_group_ids.tolist()
    else:
        flat = output.view(-1).numpy()
    begin = 0
    for i, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
        if MULTI_GROUP:
            first = addresses[groups[i]] + 4 * (row * strides[groups[i]] + start)
            int32_at(first, end - begin)[:] = contents[begin:end]
        else:
            flat[row * output_stride + start :][: end - begin] = contents[begin:end]
        begin = end


@lru_cache(maxsize=256)
def int32_at(address: int, *shape: int) -> np.ndarray:
    """Returns a view of the int32 array of this shape at `address`. Who uses the view must know
    that the array is alive; who keeps it does no harm."""
    numbers = (ctypes.c_int32 * math.prod(shape)).from_address(address)
    return np.frombuffer(memoryview(numbers).cast("B"), dtype=np.int32).reshape(shape)
