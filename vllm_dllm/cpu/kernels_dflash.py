"""Native version of the kernel of `vllm/v1/worker/gpu/spec_decode/dflash/speculator.py`.

Names as in `kernels_input_batch.py`. A request's draft block is its anchor, the token sampled last,
and the mask tokens behind it. The context is what the target has just computed, less what it
rejected.
"""

import numpy as np
import torch

Grid = tuple[int, ...]


def prepare_dflash_inputs(
    grid: Grid,  # (num_reqs, num_blocks)
    input_ids: torch.Tensor,  # [max_num_tokens] int32, written: the draft blocks
    query_positions: torch.Tensor,  # [max_num_tokens] int64, written
    query_start_loc: torch.Tensor,  # [max_num_reqs + 1] int32, written
    seq_lens: torch.Tensor,  # [max_num_reqs] int32, written: context and block; 0 beyond the batch
    query_slots: torch.Tensor,  # [max_num_tokens] int64, written: cache slots of the block
    context_positions: torch.Tensor,  # [max_num_tokens] int64, written; 0 where rejected
    context_slots: torch.Tensor,  # [max_num_tokens] int64, written; padding where rejected
    sample_indices: torch.Tensor,  # [max_num_reqs * N] int64, written: rows that draft
    sample_pos: torch.Tensor,  # [max_num_reqs * N] int64, written: position of each draft
    sample_slots: torch.Tensor,  # [max_num_reqs * N] int64, written; -1 beyond the batch
    temperature_out: torch.Tensor,  # [max_num_reqs] fp32, written
    seeds_out: torch.Tensor,  # [max_num_reqs] int64, written
    target_positions: torch.Tensor,  # [num_tokens] int64
    target_query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    last_sampled: torch.Tensor,  # [max_num_reqs, 1] int64
    next_prefill_tokens: torch.Tensor,  # [num_lookahead, max_num_reqs] int32
    num_sampled: torch.Tensor,  # [num_reqs] int32
    num_rejected: torch.Tensor,  # [num_reqs] int32
    temperature: torch.Tensor,  # [max_num_reqs] fp32
    seeds: torch.Tensor,  # [max_num_reqs] int64
    block_table: torch.Tensor,  # [>= num_reqs, max_num_blocks] int32; block 0 holds nothing
    block_table_stride: int,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> None:
    assert CP_SIZE == 1, "context parallelism needs a GPU"
    num_reqs, width = grid[0], num_query_per_req
    slots = idx_mapping[:num_reqs]
    tables = block_table.numpy()

    def cache_slots(row: int, positions: np.ndarray) -> np.ndarray:
        blocks = tables[row, np.minimum(positions // block_size, block_table_stride - 1)]
        found = blocks.astype(np.int64) * block_size + positions % block_size
        return np.where(blocks == 0, PAD_SLOT_ID, found)

    context, context_out = context_positions.numpy(), context_slots.numpy()
    positions, slots_out, targets = (
        t.numpy() for t in (query_positions, query_slots, target_positions)
    )
    bounds, rejected = target_query_start_loc.tolist(), num_rejected.tolist()
    blocks = np.empty((num_reqs, width), np.int64)
    for row in range(num_reqs):
        begin, end = bounds[row], bounds[row + 1]
        kept = end - rejected[row]
        context[begin:kept] = targets[begin:kept]
        context_out[begin:kept] = cache_slots(row, targets[begin:kept])
        context[kept:end], context_out[kept:end] = 0, PAD_SLOT_ID
        first = int(targets[kept - 1]) + 1
        blocks[row] = np.arange(first, first + width)
        slots_out[row * width : (row + 1) * width] = cache_slots(row, blocks[row])
    num_queries = num_reqs * width
    positions[:num_queries] = np.minimum(blocks, max_model_len - 1).ravel()
    slots_out[num_queries:max_num_tokens] = PAD_SLOT_ID

    ids = input_ids[:num_queries].view(num_reqs, width)
    ids.fill_(mask_token_id)
    anchors = torch.where(
        num_sampled[:num_reqs] > 0, last_sampled[slots, 0].int(), next_prefill_tokens[0, slots]
    )
    ids[:, 0] = anchors
    starts = query_start_loc.numpy()
    starts[:num_reqs] = np.arange(0, num_queries, width)
    starts[num_reqs : max_num_reqs + 1] = num_queries
    lengths = seq_lens.numpy()
    lengths[:num_reqs] = np.minimum(blocks[:, -1] + 1, max_model_len)
    lengths[num_reqs:max_num_reqs] = 0

    first_draft = 0 if SAMPLE_FROM_ANCHOR else 1
    num_drafts = num_reqs * num_speculative_steps
    columns = np.arange(first_draft, first_draft + num_speculative_steps)
    rows = starts[:num_reqs, None] + columns
    indices, draft_positions, draft_slots = (
        t.numpy() for t in (sample_indices, sample_pos, sample_slots)
    )
    indices[:num_drafts] = rows.ravel()
    draft_positions[:num_drafts] = (blocks[:, columns] + (1 - first_draft)).ravel()
    draft_slots[:num_drafts] = np.repeat(slots.numpy(), num_speculative_steps)
    last = max_num_reqs * num_speculative_steps
    indices[num_drafts:last], draft_positions[num_drafts:last] = 0, 0
    draft_slots[num_drafts:last] = -1
    temperature_out[slots], seeds_out[slots] = temperature[slots], seeds[slots]
