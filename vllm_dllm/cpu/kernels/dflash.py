"""Native version of the kernel of `vllm/v1/worker/gpu/spec_decode/dflash/speculator.py`.

Names as in `input_batch.py`. A request's draft block is its anchor, the token sampled last, and the
mask tokens after it. The context is what the target has just computed, without rejected tokens.
"""

from itertools import pairwise

import numpy as np
import torch


def prepare_dflash_inputs(
    grid: tuple[int, ...],  # (num_reqs, num_blocks)
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
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    out_is_padding: torch.Tensor | None = None,  # [max_num_tokens] bool, written; since 0.33
) -> None:
    """Writes the inputs of each request's draft block, and where its context is stored. N = drafts
    of a request (`num_speculative_steps`)."""
    assert CP_SIZE == 1, "context parallelism needs a GPU"
    num_reqs, slots = grid[0], idx_mapping[: grid[0]]
    table = block_table.numpy()

    def slots_of(row: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the slots, int64, of `positions` of requests; `PAD_SLOT_ID` without a block."""
        blocks = table[row, np.minimum(positions // block_size, block_table_stride - 1)]
        in_blocks = blocks.astype(np.int64) * block_size + positions % block_size
        return np.where(blocks == 0, PAD_SLOT_ID, in_blocks)

    positions, mapping = out_context_positions.numpy(), out_context_slot_mapping.numpy()
    targets, rejected = target_positions.numpy(), num_rejected.tolist()
    firsts = np.empty(num_reqs, np.int64)  # the position after the last accepted one
    bounds = target_query_start_loc[: num_reqs + 1].tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        kept = end - rejected[row]
        positions[begin:kept] = targets[begin:kept]
        mapping[begin:kept] = slots_of(row, targets[begin:kept])
        positions[kept:end], mapping[kept:end] = 0, PAD_SLOT_ID
        firsts[row] = targets[kept - 1] + 1

    blocks = firsts[:, None] + np.arange(num_query_per_req)  # [num_reqs, width], positions
    positions, mapping = out_query_positions.numpy(), out_query_slot_mapping.numpy()
    positions[: blocks.size] = np.minimum(blocks, max_model_len - 1).ravel()
    mapping[: blocks.size] = slots_of(np.arange(num_reqs)[:, None], blocks).ravel()
    mapping[blocks.size : max_num_tokens] = PAD_SLOT_ID
    if out_is_padding is not None:
        for out, rest in ((out_is_padding, 1), (out_input_ids, 0), (out_query_positions, 0)):
            out[blocks.size : max_num_tokens] = rest
        out_is_padding[: blocks.size] = False
    begins, lengths = np.arange(0, blocks.size, num_query_per_req), out_seq_lens.numpy()
    out_query_start_loc.numpy()[:num_reqs] = begins
    out_query_start_loc[num_reqs : max_num_reqs + 1] = blocks.size
    lengths[:num_reqs] = np.minimum(blocks[:, -1] + 1, max_model_len)
    lengths[num_reqs:max_num_reqs] = 0

    ids = out_input_ids[: blocks.size].view(blocks.shape)
    ids.fill_(parallel_drafting_token_id)
    sampled, prefilled = last_sampled[slots, 0].int(), next_prefill_tokens[0, slots]
    ids[:, 0] = torch.where(num_sampled[:num_reqs] > 0, sampled, prefilled)
    columns = np.arange(num_speculative_steps) + (0 if SAMPLE_FROM_ANCHOR else 1)
    for out, values, rest in (
        (out_sample_indices, begins[:, None] + columns, 0),
        (out_sample_pos, blocks[:, columns] + (1 - columns[0]), 0),
        (out_sample_idx_mapping, np.repeat(slots.numpy(), len(columns)), -1),
    ):
        out.numpy()[: values.size] = values.ravel()
        out[values.size : max_num_reqs * num_speculative_steps] = rest
    out_temperature[slots], out_seeds[slots] = temperature[slots], seeds[slots]
