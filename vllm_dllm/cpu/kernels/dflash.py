"""Native version of the kernel of `vllm/v1/worker/gpu/spec_decode/dflash/speculator.py`.

Names as in `input_batch.py`. A request's draft block is its anchor, the token sampled last,
and the mask tokens behind it. The context is what the target has just computed, less what it
rejected.
"""

import numpy as np
import torch

Grid = tuple[int, ...]


def prepare_dflash_inputs(
    grid: Grid,  # (num_reqs, num_blocks)
    out_input_ids: torch.Tensor,  # [max_num_tokens] int32, written: the draft blocks
    out_query_positions: torch.Tensor,  # [max_num_tokens] int64, written
    out_query_start_loc: torch.Tensor,  # [max_num_reqs + 1] int32, written
    out_seq_lens: torch.Tensor,  # [max_num_reqs] int32, written: with the block; 0 beyond them
    out_query_slot_mapping: torch.Tensor,  # [max_num_tokens] int64, written for the block
    out_context_positions: torch.Tensor,  # [max_num_tokens] int64, written; 0 where rejected
    out_context_slot_mapping: torch.Tensor,  # [max_num_tokens] int64, written
    out_sample_indices: torch.Tensor,  # [max_num_reqs * N] int64, written: rows that draft
    out_sample_pos: torch.Tensor,  # [max_num_reqs * N] int64, written: position of each draft
    out_sample_idx_mapping: torch.Tensor,  # [max_num_reqs * N] int64, written; -1 beyond the batch
    out_temperature: torch.Tensor,  # [max_num_reqs] fp32, written
    out_seeds: torch.Tensor,  # [max_num_reqs] int64, written
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
    parallel_drafting_token_id: int,
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
    **block_sizes: int,
) -> None:
    assert CP_SIZE == 1, "context parallelism needs a GPU"
    num_reqs, width = grid[0], num_query_per_req
    slots = idx_mapping[:num_reqs]
    tables = block_table.numpy()

    def cache_slots(row: int, positions: np.ndarray) -> np.ndarray:
        blocks = tables[row, np.minimum(positions // block_size, block_table_stride - 1)]
        found = blocks.astype(np.int64) * block_size + positions % block_size
        return np.where(blocks == 0, PAD_SLOT_ID, found)

    context, context_out = out_context_positions.numpy(), out_context_slot_mapping.numpy()
    positions, slots_out, targets = (
        t.numpy() for t in (out_query_positions, out_query_slot_mapping, target_positions)
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

    ids = out_input_ids[:num_queries].view(num_reqs, width)
    ids.fill_(parallel_drafting_token_id)
    anchors = torch.where(
        num_sampled[:num_reqs] > 0, last_sampled[slots, 0].int(), next_prefill_tokens[0, slots]
    )
    ids[:, 0] = anchors
    starts = out_query_start_loc.numpy()
    starts[:num_reqs] = np.arange(0, num_queries, width)
    starts[num_reqs : max_num_reqs + 1] = num_queries
    lengths = out_seq_lens.numpy()
    lengths[:num_reqs] = np.minimum(blocks[:, -1] + 1, max_model_len)
    lengths[num_reqs:max_num_reqs] = 0

    first_draft = 0 if SAMPLE_FROM_ANCHOR else 1
    num_drafts = num_reqs * num_speculative_steps
    columns = np.arange(first_draft, first_draft + num_speculative_steps)
    rows = starts[:num_reqs, None] + columns
    indices, draft_positions, draft_slots = (
        t.numpy() for t in (out_sample_indices, out_sample_pos, out_sample_idx_mapping)
    )
    indices[:num_drafts] = rows.ravel()
    draft_positions[:num_drafts] = (blocks[:, columns] + (1 - first_draft)).ravel()
    draft_slots[:num_drafts] = np.repeat(slots.numpy(), num_speculative_steps)
    last = max_num_reqs * num_speculative_steps
    indices[num_drafts:last], draft_positions[num_drafts:last] = 0, 0
    draft_slots[num_drafts:last] = -1
    out_temperature[slots], out_seeds[slots] = temperature[slots], seeds[slots]
