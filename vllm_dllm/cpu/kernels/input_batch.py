"""Native versions of the kernels of `vllm/v1/worker/gpu/input_batch.py`.

Tensors are used through NumPy views of their memory. Names: batch row = position in this step's
batch, slot = the request's row in the runner's state (`req_state_idx` in vLLM). Batches are small:
a loop over requests with Python's own numbers and one slice each is faster than building flat
indices.
"""

from itertools import pairwise

import numpy as np
import torch


def prepare_prefill_inputs(
    input_ids: torch.Tensor,  # [num_tokens] int32, written where a request is prefilling
    next_prefill_tokens: torch.Tensor,  # [num_lookahead, max_num_reqs] int32, written likewise
    num_lookahead: int,
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32
    prefill_lens: torch.Tensor,  # [max_num_reqs] int32
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
) -> None:
    """Writes the scheduled tokens of prefilling requests to `input_ids`. Writes the `num_lookahead`
    tokens that follow them to `next_prefill_tokens`, and 0 beyond the prefill."""
    slots = idx_mapping.numpy()
    computed = num_computed_tokens.numpy()[slots]
    ends = prefill_lens.numpy()[slots]
    starts = query_start_loc.numpy()
    ids, tokens, lookahead = input_ids.numpy(), all_token_ids.numpy(), next_prefill_tokens.numpy()
    for row in np.flatnonzero(computed < ends).tolist():
        slot, first, begin = slots[row], computed[row], starts[row]
        after = first + starts[row + 1] - begin
        ids[begin : starts[row + 1]] = tokens[slot, first:after]
        upcoming = tokens[slot, after : min(after + num_lookahead, ends[row])]
        lookahead[: len(upcoming), slot] = upcoming
        lookahead[len(upcoming) : num_lookahead, slot] = 0


def prepare_pos_seq_lens(
    grid: tuple[int, ...],  # (num_reqs + 1,)
    pos: torch.Tensor,  # [max_num_tokens] int64, written for the scheduled tokens
    seq_lens: torch.Tensor,  # [max_num_reqs] int32, written; 0 beyond the batch
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
    max_num_reqs: int,
) -> None:
    """Writes positions of the scheduled tokens, and lengths of the requests after this step."""
    num_reqs = grid[0] - 1
    positions, lengths, computed = pos.numpy(), seq_lens.numpy(), num_computed_tokens.numpy()
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        begin, end, first = bounds[row], bounds[row + 1], int(computed[slot])
        lengths[row] = first + end - begin
        positions[begin:end] = np.arange(first, first + end - begin)
    lengths[num_reqs:max_num_reqs] = 0


def combine_sampled_and_draft_tokens(
    grid: tuple[int, ...],  # (num_reqs,)
    input_ids: torch.Tensor,  # [num_tokens] int32, written for requests past their prefill
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs, 1] int64
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [>= num_reqs] int32
    prefill_len: torch.Tensor,  # [max_num_reqs] int32
    draft_tokens: torch.Tensor,  # [max_num_reqs, num_speculative_steps] int64
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32, where each request's rows begin, and end
    logits_indices: torch.Tensor,  # [num_logits] int64, written
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Writes the last sampled token and then the drafts to the end of the query in `input_ids`, for
    requests past their prefill. The sampled token is left out where its place still belongs to the
    prompt, or if `NUM_NEW_SAMPLED_TOKENS` is 0. For all requests, writes to `logits_indices` which
    rows become logits: the last ones of the query."""
    ids, rows = input_ids.numpy(), logits_indices.numpy()
    last_sampled, drafts = last_sampled_tokens.numpy(), draft_tokens.numpy()
    slots = idx_mapping.tolist()
    prefilled = prefill_len.numpy()
    logit_bounds = cu_num_logits.tolist()
    query_ends = query_start_loc.tolist()[1:]
    lengths = seq_lens.tolist()
    for row in range(grid[0]):
        begin, end = logit_bounds[row], logit_bounds[row + 1]
        num_logits, query_end = end - begin, query_ends[row]
        first_logit = query_end - num_logits
        rows[begin:end] = np.arange(first_logit, query_end)
        slot, seq_len = slots[row], lengths[row]
        if seq_len <= prefilled[slot]:
            continue
        # A query slot that still belongs to the prompt keeps its token.
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - num_logits >= prefilled[slot]:
            ids[first_logit] = last_sampled[slot, 0]
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            ids[query_end - num_drafts : query_end] = drafts[slot, :num_drafts]


def get_num_sampled_and_rejected(
    grid: tuple[int, ...],  # (num_reqs,)
    num_sampled: torch.Tensor,  # [num_reqs] int32, set to 0 for a prefill that goes on
    num_rejected: torch.Tensor,  # [num_reqs] int32, written
    seq_lens: torch.Tensor,  # [>= num_reqs] int32
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    prefill_len: torch.Tensor,  # [max_num_reqs] int32
) -> None:
    """Writes how many rows of logits were rejected: all but the sampled ones. Sets both counts to 0
    for unfinished prefills."""
    num_reqs = grid[0]
    prefills_on = seq_lens.numpy()[:num_reqs] < prefill_len.numpy()[idx_mapping.numpy()]
    sampled = num_sampled.numpy()[:num_reqs]
    sampled[prefills_on] = 0
    rejected = np.diff(cu_num_logits.numpy()[: num_reqs + 1]) - sampled
    num_rejected.numpy()[:num_reqs] = np.where(prefills_on, 0, rejected)


def post_update(
    idx_mapping: torch.Tensor,  # [num_reqs] int64, negative = leave this request alone
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32, advanced
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs, 1] int64, written
    output_bin_counts: torch.Tensor | None,  # [max_num_reqs, vocab_size] int32, added to
    sampled_tokens: torch.Tensor,  # [num_reqs, max_sampled]
    num_sampled: torch.Tensor,  # [num_reqs] int32
    num_rejected: torch.Tensor,  # [num_reqs] int32
    query_start_loc: torch.Tensor | None,  # [>= num_reqs + 1] int32; None = queries of length 0
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32, appended to
    total_len: torch.Tensor,  # [max_num_reqs] int32, advanced
    draft_tokens: torch.Tensor | None = None,  # [num_reqs, num_draft_tokens]
    draft_tokens_out: torch.Tensor | None = None,  # [max_num_reqs, num_draft_tokens], written
    num_draft_tokens: int = 0,
) -> None:
    """Records the outcome of a step in the requests' state, in place: new tokens, computed KV
    positions and, where they come from another rank, drafts."""
    computed, totals, tokens = num_computed_tokens.numpy(), total_len.numpy(), all_token_ids.numpy()
    last, sampled = last_sampled_tokens.numpy(), sampled_tokens.numpy()
    counts, rejected = num_sampled.tolist(), num_rejected.tolist()
    bounds = None if query_start_loc is None else query_start_loc.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[slot, :num_draft_tokens] = draft_tokens[row, :num_draft_tokens]
        query_len = 0 if bounds is None else bounds[row + 1] - bounds[row]
        computed[slot] += query_len - rejected[row]
        if (count := counts[row]) > 0:
            gained = sampled[row, :count]
            total = totals[slot]
            tokens[slot, total : total + count] = gained
            last[slot, 0] = gained[-1]
            totals[slot] = total + count
            if output_bin_counts is not None:
                np.add.at(output_bin_counts.numpy()[slot], gained, 1)


def post_update_num_computed_tokens(
    grid: tuple[int, ...],  # (num_reqs,)
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32, advanced by the query lengths
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
) -> None:
    """Adds the length of each request's query to its computed tokens, in place."""
    num_reqs = grid[0]
    slots = idx_mapping.numpy()[:num_reqs]
    num_computed_tokens.numpy()[slots] += np.diff(query_start_loc.numpy()[: num_reqs + 1])


def expand_idx_mapping(
    grid: tuple[int, ...],  # (num_reqs,)
    idx_mapping: torch.Tensor,  # [num_reqs] int64
    expanded_idx_mapping: torch.Tensor,  # [num_logits] int64, written: the slot of each logit row
    expanded_local_pos: torch.Tensor,  # [num_logits] int32, written: its index in its request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
) -> None:
    """Writes the slot of each row of logits, and the row's index in its request."""
    bounds = cu_num_logits.tolist()[: grid[0] + 1]
    slots, local = expanded_idx_mapping.numpy(), expanded_local_pos.numpy()
    for (begin, end), slot in zip(pairwise(bounds), idx_mapping.tolist(), strict=True):
        slots[begin:end] = slot
        local[begin:end] = np.arange(end - begin)
