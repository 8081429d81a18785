"""Native versions of the kernels of `vllm/v1/worker/gpu/block_table.py`.

Block tables arrive as addresses, one a KV-cache group, of int32 arrays [max_num_reqs, stride].
"""

import numpy as np
import torch

from vllm_dllm.cpu.memory import int32_at

Grid = tuple[int, ...]


def gather_block_tables(
    grid: Grid,  # (num_groups, num_reqs_padded)
    batch_idx_to_req_idx: torch.Tensor,  # [num_reqs] int64
    src_block_table_ptrs: torch.Tensor,  # [num_groups] uint64
    dst_block_table_ptrs: torch.Tensor,  # [num_groups] uint64, tables written
    block_table_strides: torch.Tensor,  # [num_groups] int64
    num_blocks: torch.Tensor,  # [num_groups, max_num_reqs] int32, blocks each request has
    num_blocks_stride: int,
    num_reqs: int,
    **block_sizes: int,
) -> None:
    """Copies the batch's rows, as far as they are in use, and clears the padding rows."""
    num_rows = grid[1]
    slots = batch_idx_to_req_idx.numpy()
    used = num_blocks.numpy()[:, slots]
    max_slots = num_blocks.shape[1]
    for group, (source, target, stride) in enumerate(
        zip(
            src_block_table_ptrs.tolist(),
            dst_block_table_ptrs.tolist(),
            block_table_strides.tolist(),
            strict=True,
        )
    ):
        table = int32_at(source, max_slots * stride).reshape(max_slots, stride)
        rows = int32_at(target, num_rows * stride).reshape(num_rows, stride)
        width = used[group].max(initial=0)
        in_use = np.arange(width) < used[group][:, None]
        np.copyto(rows[:num_reqs, :width], table[slots, :width], where=in_use)
        rows[num_reqs:] = 0


def compute_slot_mappings(
    grid: Grid,  # (num_groups, num_reqs + 1)
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [num_reqs] int64, -1 = a dummy that owns no blocks
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    pos: torch.Tensor,  # [num_tokens] int64
    block_table_ptrs: torch.Tensor,  # [num_groups] uint64
    block_table_strides: torch.Tensor,  # [num_groups] int64
    block_sizes: torch.Tensor,  # [num_groups] int32
    slot_mapping_enabled: torch.Tensor,  # [num_groups] bool
    dcp_sharded: torch.Tensor,  # [num_groups] bool
    slot_mappings: torch.Tensor,  # [num_groups, max_num_tokens] int64, written
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    **other_block_sizes: int,
) -> None:
    """The KV-cache slot of each token; `PAD_ID` beyond the batch and where there is none."""
    assert CP_SIZE == 1, "vLLM has no context parallelism on CPUs"
    num_reqs = grid[1] - 1
    bounds = query_start_loc.numpy()[: num_reqs + 1]
    slots = idx_mapping.numpy()
    begin, end = int(bounds[0]), int(bounds[-1])
    positions = pos.numpy()[begin:end]
    slot_of_token = np.repeat(slots, np.diff(bounds))
    is_dummy = slot_of_token < 0 if (slots < 0).any() else None
    num_slots = int(slots.max(initial=-1)) + 1
    mappings = slot_mappings.numpy()
    for group, (address, stride, block_size, enabled) in enumerate(
        zip(
            block_table_ptrs.tolist(),
            block_table_strides.tolist(),
            block_sizes.tolist(),
            slot_mapping_enabled.tolist(),
            strict=True,
        )
    ):
        mapping = mappings[group]
        mapping[end:max_num_tokens] = PAD_ID
        if not enabled or num_slots == 0:
            mapping[begin:end] = PAD_ID
            continue
        table = int32_at(address, num_slots * stride).reshape(num_slots, stride)
        blocks, offsets = np.divmod(positions, block_size)
        mapping[begin:end] = table[slot_of_token, blocks].astype(np.int64) * block_size + offsets
        if is_dummy is not None:
            mapping[begin:end][is_dummy] = PAD_ID
