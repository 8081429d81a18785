"""Native versions of the kernels that draw, score and forbid tokens: `sample/gumbel.py`,
`sample/logprob.py`, `sample/prompt_logprob.py`, `spec_decode/rejection_sampler.py` and
`structured_outputs.py` in `vllm/v1/worker/gpu`. V = vocabulary."""

import numpy as np
import torch

from vllm_dllm.cpu.compat.runner import draft_seeds
from vllm_dllm.cpu.verification import gumbel_noise

_DRAFT_POSITION = 1 << 30  # added to a draft's position: its verification draws other noise


def temperature(
    logits: torch.Tensor,  # [num_rows, V] fp32, divided in place
    expanded_idx_mapping: torch.Tensor,  # [num_rows] int64, row -> slot
    temperature: torch.Tensor,  # [max_num_reqs] fp32
    vocab_size: int,
) -> None:
    """Divides logits by each request's temperature, in place. 0 and 1 leave a row as it is."""
    divisors = temperature[expanded_idx_mapping]
    divisors[divisors == 0] = 1.0
    if not torch.all(divisors == 1.0):
        logits[:, :vocab_size].div_(divisors[:, None])


def gumbel_sample(
    local_argmax: torch.Tensor,  # [num_rows, num_blocks] int64, written
    local_max: torch.Tensor,  # [num_rows, num_blocks] fp32 or fp64, written
    logits_cache: torch.Tensor | None,  # [max_num_reqs, num_cols, >= V], rows of live slots written
    logits_cache_col: torch.Tensor | None,  # [] or [num_rows] int32
    logits_cache_source: torch.Tensor | None,  # [num_rows, V]
    logits: torch.Tensor,  # [num_rows, V]
    expanded_idx_mapping: torch.Tensor,  # [num_rows] int64, row -> slot, negative = no request
    seeds: torch.Tensor,  # [max_num_reqs] int64
    pos: torch.Tensor,  # [num_rows] int64
    temp: torch.Tensor,  # [max_num_reqs] fp32
    vocab_size: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    BLOCK_SIZE: int,  # of the vocabulary
) -> None:
    """Writes the largest logit under Gumbel noise, and its token, of each row and block of the
    vocabulary. There is no noise at temperature 0.

    With `logits_cache`, also copies `logits_cache_source` to the column of each request's slot.
    """
    slots = expanded_idx_mapping
    live = slots >= 0
    row_seeds = seeds[slots.clamp(min=0)]
    if logits_cache is not None:
        assert logits_cache_col is not None and logits_cache_source is not None
        columns = logits_cache_col.expand(len(slots)).long()
        logits_cache[slots[live], columns[live], :vocab_size] = logits_cache_source[live]
        row_seeds = draft_seeds(row_seeds, columns)
    temperatures = torch.where(live, temp[slots.clamp(min=0)], 0.0)
    scores = logits.to(torch.float64 if USE_FP64 else torch.float32)
    rows = torch.nonzero(temperatures != 0)[:, 0]
    if len(rows):
        noised = logits[rows].float()
        if APPLY_TEMPERATURE:
            noised /= temperatures[rows, None]
        positions = pos[rows] + (_DRAFT_POSITION if IS_DRAFTING else 0)
        noise = gumbel_noise(
            row_seeds[rows, None].numpy(),
            positions[:, None].numpy(),
            np.arange(vocab_size)[None],
            USE_FP64,
        )
        scores = scores.index_copy(0, rows, noised.to(scores.dtype) + torch.from_numpy(noise))
    for block, first in enumerate(range(0, vocab_size, BLOCK_SIZE)):
        values, ids = scores[:, first : first + BLOCK_SIZE].max(dim=1)
        local_max[:, block], local_argmax[:, block] = values, ids + first


def gather_draft_sampled(
    draft_sampled: torch.Tensor,  # [num_logits] int32, written: each row's input token, or -1
    pos: torch.Tensor,  # [num_logits] int64, written: its position
    input_ids: torch.Tensor,  # [num_tokens] int32
    positions: torch.Tensor,  # [num_tokens] int64
    logits_indices: torch.Tensor,  # [num_logits] int64, the token of each row
    expanded_idx_mapping: torch.Tensor,  # [num_logits] int64, row -> slot
    expanded_local_pos: torch.Tensor,  # [num_logits] int32, the row's index in its request
    prefill_len: torch.Tensor,  # [max_num_reqs] int32
) -> None:
    """Writes the input token and position of each row of logits. Writes -1 for drafts of a step
    that starts within the prefill, which no drafter proposed."""
    torch.index_select(positions, 0, logits_indices, out=pos)
    torch.index_select(input_ids, 0, logits_indices, out=draft_sampled)
    starts_in_prefill = pos - expanded_local_pos < prefill_len[expanded_idx_mapping]
    draft_sampled[(expanded_local_pos > 0) & starts_in_prefill] = -1


def flatten_sampled(
    flat_sampled: torch.Tensor,  # [num_logits] int64, written for the rows that were kept
    sampled: torch.Tensor,  # [num_reqs, num_columns] int64
    num_sampled: torch.Tensor,  # [num_reqs] int32
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
) -> None:
    """Copies each request's sampled tokens to its first rows of `flat_sampled`."""
    starts = cu_num_logits.tolist()
    for row, count in enumerate(num_sampled.tolist()):
        flat_sampled[starts[row] : starts[row] + count] = sampled[row, :count]


def topk_log_softmax(
    output: torch.Tensor,  # [num_rows, topk] fp32, written
    logits: torch.Tensor,  # [num_rows, V]
    topk_ids: torch.Tensor,  # [num_rows, topk] int64
) -> None:
    """Writes the log-probabilities of the tokens `topk_ids`."""
    scores = logits.float()
    torch.sub(scores.gather(1, topk_ids), scores.logsumexp(1, keepdim=True), out=output)


def ranks(
    output: torch.Tensor,  # [num_rows] int64, written
    logits: torch.Tensor,  # [num_rows, V]
    token_ids: torch.Tensor,  # [num_rows] int64
) -> None:
    """Writes how many tokens are at least as likely as each row's token. That token counts, too."""
    chosen = logits.gather(1, token_ids[:, None].long())
    torch.sum(logits >= chosen, dim=1, out=output)


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,  # [num_tokens] int64, written
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32
    all_token_ids_stride: int,
) -> None:
    """Writes the token that follows each scheduled one in its request; 0 where none can."""
    targets, tokens = prompt_logprobs_token_ids.numpy(), all_token_ids.view(-1).numpy()
    bounds = query_start_loc.tolist()
    computed = num_computed_tokens.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        # Flat, since the kernel reads past a row whose last token is scheduled.
        first = slot * all_token_ids_stride + int(computed[slot]) + 1
        following = tokens[first : first + end - begin]
        targets[begin : begin + len(following)] = following
        # Nothing follows the last slot's last token, whose score is not reported.
        targets[begin + len(following) : end] = 0


def apply_grammar_bitmask(
    grid: tuple[int, ...],  # (num_masks, ...)
    logits: torch.Tensor,  # [num_logits, V], -inf is written where a token is forbidden
    logits_indices: torch.Tensor,  # [num_masks] int32: request * MASK_STRIDE + row in the request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1] int32
    bitmask: torch.Tensor,  # [num_masks, ceil(V / 32)] int32, 1 = allowed, lowest bit first
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Sets logits of tokens that a grammar forbids to minus infinity, in place."""
    bounds = cu_num_logits.tolist()
    packed = bitmask.numpy().view(np.uint8)
    for mask, index in enumerate(logits_indices.tolist()[: grid[0]]):
        request, position = divmod(index, MASK_STRIDE)
        row = bounds[request] + position
        if row < bounds[request + 1]:
            allowed = np.unpackbits(packed[mask], count=vocab_size, bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)
