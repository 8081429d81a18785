"""Native version of the kernel of `vllm/v1/worker/gpu/spec_decode/dflash/speculator.py`.

Names as in `input_batch.py`. A request's draft block is its anchor, the token sampled last, and the
mask tokens after it. The context is what the target has just computed, without rejected tokens.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

Grid = tuple[int, ...]


def prepare_dflash_inputs(
    grid: Grid,  # (num_reqs, num_blocks)
    out_input_ids: torch.Tensor,  # [max_num_tokens] int32, written: the draft blocks
    out_query_positions: torch.Tensor,  # [max_num_tokens] int64, written
    out_is_padding: torch.Tensor | None,  # [max_num_tokens] bool, written; None: nobody asks
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
    """Writes the inputs of each request's draft block, and where its context is stored. N = drafts
    of a request (`num_speculative_steps`)."""
    assert CP_SIZE == 1, "context parallelism needs a GPU"
    num_reqs, slots = grid[0], idx_mapping[: grid[0]]
    cache = _Cache(block_table.numpy(), block_table_stride, block_size, PAD_SLOT_ID)
    context_out = out_context_positions, out_context_slot_mapping
    bounds = target_query_start_loc[: num_reqs + 1]
    firsts = _write_context_slots(cache, *context_out, target_positions, bounds, num_rejected)
    blocks = firsts[:, None] + np.arange(num_query_per_req)
    query_out = out_query_positions, out_query_slot_mapping[:max_num_tokens]
    _write_queries(cache, *query_out, blocks, max_model_len - 1)
    if out_is_padding is not None:
        for out, rest in ((out_is_padding, 1), (out_input_ids, 0), (out_query_positions, 0)):
            out[blocks.size : max_num_tokens] = rest
        out_is_padding[: blocks.size] = False
    _write_lengths(out_query_start_loc, out_seq_lens[:max_num_reqs], blocks, max_model_len)

    ids = out_input_ids[: blocks.size].view(blocks.shape)
    ids.fill_(parallel_drafting_token_id)
    sampled, prefilled = last_sampled[slots, 0].int(), next_prefill_tokens[0, slots]
    ids[:, 0] = torch.where(num_sampled[:num_reqs] > 0, sampled, prefilled)
    columns = np.arange(num_speculative_steps) + (0 if SAMPLE_FROM_ANCHOR else 1)
    last = max_num_reqs * num_speculative_steps
    samples_out = out_sample_indices[:last], out_sample_pos[:last], out_sample_idx_mapping[:last]
    _write_samples(*samples_out, blocks, columns, slots)
    out_temperature[slots], out_seeds[slots] = temperature[slots], seeds[slots]


@dataclass(frozen=True)
class _Cache:
    """The drafter's KV cache: which block of it holds which positions of a request."""

    blocks: np.ndarray  # [>= num_reqs, max_num_blocks] int32
    max_num_blocks: int
    block_size: int
    pad_slot: int

    def slots(self, row: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the slots, int64, that hold `positions` of the requests in `row` of the block
        table. `pad_slot` where a request has no block."""
        columns = np.minimum(positions // self.block_size, self.max_num_blocks - 1)
        blocks = self.blocks[row, columns]
        found = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        return np.where(blocks == 0, self.pad_slot, found)


def _write_context_slots(
    cache: _Cache,
    out_positions: torch.Tensor,  # [max_num_tokens] int64
    out_slots: torch.Tensor,  # [max_num_tokens] int64
    target_positions: torch.Tensor,  # [num_tokens] int64
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    num_rejected: torch.Tensor,  # [num_reqs] int32
) -> np.ndarray:
    """Writes positions and slots of the tokens that the target has just computed; 0 and the padding
    slot for rejected ones. Returns the position after the last accepted one for each request,
    [num_reqs] int64."""
    positions, slots, targets = (t.numpy() for t in (out_positions, out_slots, target_positions))
    firsts = np.empty(len(query_start_loc) - 1, np.int64)
    rejected = num_rejected.tolist()
    for row, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        kept = end - rejected[row]
        positions[begin:kept] = targets[begin:kept]
        slots[begin:kept] = cache.slots(row, targets[begin:kept])
        positions[kept:end], slots[kept:end] = 0, cache.pad_slot
        firsts[row] = targets[kept - 1] + 1
    return firsts


def _write_queries(
    cache: _Cache,
    out_positions: torch.Tensor,  # [max_num_tokens] int64
    out_slots: torch.Tensor,  # [max_num_tokens] int64, written to its end
    blocks: np.ndarray,  # [num_reqs, width] int64, positions of the draft blocks
    last_position: int,
) -> None:
    """Writes positions, at most `last_position`, and slots of the draft blocks' tokens, and the
    padding slot beyond them."""
    positions, slots = out_positions.numpy(), out_slots.numpy()
    positions[: blocks.size] = np.minimum(blocks, last_position).ravel()
    slots[: blocks.size] = cache.slots(np.arange(len(blocks))[:, None], blocks).ravel()
    slots[blocks.size :] = cache.pad_slot


def _write_lengths(
    out_query_start_loc: torch.Tensor,  # [max_num_reqs + 1] int32
    out_seq_lens: torch.Tensor,  # [max_num_reqs] int32
    blocks: np.ndarray,  # [num_reqs, width] int64
    max_model_len: int,
) -> None:
    """Writes where each request's block begins in the batch, and the requests' lengths with their
    blocks, at most `max_model_len`."""
    (num_reqs, width), num_slots = blocks.shape, len(out_seq_lens)
    starts, lengths = out_query_start_loc.numpy(), out_seq_lens.numpy()
    starts[:num_reqs] = np.arange(0, blocks.size, width)
    starts[num_reqs : num_slots + 1] = blocks.size
    lengths[:num_reqs] = np.minimum(blocks[:, -1] + 1, max_model_len)
    lengths[num_reqs:] = 0


def _write_samples(
    out_indices: torch.Tensor,  # [max_num_reqs * N] int64
    out_positions: torch.Tensor,  # [max_num_reqs * N] int64
    out_slots: torch.Tensor,  # [max_num_reqs * N] int64
    blocks: np.ndarray,  # [num_reqs, width] int64
    columns: np.ndarray,  # [N] int64: slots of the block that drafts are sampled from
    slots: torch.Tensor,  # [num_reqs] int64
) -> None:
    """Writes row, position and slot of each token to draft; 0, 0 and -1 beyond the batch."""
    starts = np.arange(0, blocks.size, blocks.shape[1])
    for out, values, rest in (
        (out_indices, starts[:, None] + columns, 0),
        (out_positions, blocks[:, columns] + (1 - columns[0]), 0),
        (out_slots, np.repeat(slots.numpy(), len(columns)), -1),
    ):
        out.numpy()[: values.size] = values.ravel()
        out.numpy()[values.size :] = rest
