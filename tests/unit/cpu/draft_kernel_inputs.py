"""Random inputs of the kernels that draw tokens and prepare drafts."""

import numpy as np
import torch

from tests.unit.cpu.kernel_inputs import (
    CASES,
    MAX_REQS,
    SINCE_0_33,
    VOCAB,
    Batch,
    KernelInputs,
    inputs_of,
    int32,
    stale,
    tokens,
)

__all__ = ["CASES"]


def seeds(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-(2**63), 2**63, MAX_REQS))


def temperatures(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.choice([0.0, 0.3, 1.0, 1.7], MAX_REQS)).float()


def scores(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(5 * rng.standard_normal(shape)).float()


@inputs_of("sample.gumbel._temperature_kernel")
def temperature(rng: np.random.Generator) -> KernelInputs:
    num_rows = int(rng.integers(1, 8))
    logits = scores(rng, num_rows, VOCAB + 6)[:, :VOCAB]
    rows = torch.from_numpy(rng.integers(0, MAX_REQS, num_rows))
    args = [logits, VOCAB + 6, rows, temperatures(rng), VOCAB]
    return KernelInputs((num_rows, 4), args, {"BLOCK_SIZE": 16})


@inputs_of("sample.gumbel._gumbel_sample_kernel", fp32=dict(fp64=False), fp64=dict(fp64=True))
def gumbel(rng: np.random.Generator, fp64: bool) -> KernelInputs:
    num_rows, num_columns, block = int(rng.integers(1, 8)), 3, 16
    num_blocks = -(-VOCAB // block)
    drafting = bool(rng.integers(2))
    per_row = drafting and bool(rng.integers(2))
    # One request of a batch writes one column once.
    rows = torch.from_numpy(rng.permutation(MAX_REQS)[:num_rows])
    rows[rng.random(num_rows) < 0.2] = -1
    logits = scores(rng, num_rows, VOCAB)
    cache = stale(MAX_REQS, num_columns, VOCAB, dtype=torch.float32) if drafting else None
    columns = int32(rng.integers(0, num_columns, num_rows if per_row else None))
    args = [
        stale(num_rows, num_blocks, dtype=torch.int64),
        num_blocks,
        stale(num_rows, num_blocks, dtype=torch.float64 if fp64 else torch.float32),
        num_blocks,
        cache,
        num_columns * VOCAB if drafting else 0,
        VOCAB if drafting else 0,
        columns if drafting else None,
        logits.clone() if drafting else None,
        VOCAB if drafting else 0,
        logits,
        VOCAB,
        rows,
        seeds(rng),
        torch.from_numpy(rng.integers(0, 5000, num_rows)),
        temperatures(rng),
        VOCAB,
    ]
    options = {
        "BLOCK_SIZE": block,
        "IS_DRAFTING": drafting,
        "APPLY_TEMPERATURE": drafting,
        "USE_FP64": fp64,
        "PER_TOKEN_COL": per_row,
    }
    return KernelInputs((num_rows, num_blocks), args, options)


@inputs_of("spec_decode.rejection_sampler._gather_draft_sampled_kernel")
def gather_draft_sampled(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng, min_query_len=1)
    num_logits = rng.integers(1, batch.query_lens + 1)
    ends = np.cumsum(batch.query_lens)
    rows = [np.arange(end - n, end) for end, n in zip(ends, num_logits, strict=True)]
    total = int(num_logits.sum())
    args = [
        stale(total),
        stale(total, dtype=torch.int64),
        tokens(rng, batch.num_tokens),
        torch.from_numpy(rng.integers(0, 20, batch.num_tokens)),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.repeat(batch.slots.numpy(), num_logits)),
        int32(np.concatenate([np.arange(n) for n in num_logits])),
        int32(rng.integers(0, 15, MAX_REQS)),
        total,
    ]
    return KernelInputs((-(-total // 16),), args, {"BLOCK_SIZE": 16})


@inputs_of("spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(rng: np.random.Generator) -> KernelInputs:
    num_reqs, width = int(rng.integers(1, MAX_REQS)), 5
    num_logits = rng.integers(1, width + 1, num_reqs)
    args = [
        stale(int(num_logits.sum()), dtype=torch.int64),
        tokens(rng, num_reqs, width, dtype=torch.int64),
        width,
        int32(rng.integers(0, num_logits + 1)),
        int32(np.cumsum([0, *num_logits])),
    ]
    return KernelInputs((num_reqs,), args, {"num_warps": 1})


@inputs_of(
    "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
    after_anchor=dict(sample_from_anchor=False),
    from_anchor=dict(sample_from_anchor=True),
)
def dflash(rng: np.random.Generator, sample_from_anchor: bool) -> KernelInputs:
    batch = Batch.draw(rng, min_query_len=1)
    num_drafts, block_size, max_blocks = 4, 4, 12
    num_queries = num_drafts if sample_from_anchor else num_drafts + 1
    max_tokens, max_drafts = MAX_REQS * 12, MAX_REQS * num_drafts
    # Some blocks run past the end of what a request may hold, and past its block table.
    firsts = rng.integers(0, 44, batch.num_reqs)
    positions = [first + np.arange(n) for first, n in zip(firsts, batch.query_lens, strict=True)]
    args = [
        stale(max_tokens),
        stale(max_tokens, dtype=torch.int64),
        *([torch.from_numpy(rng.random(max_tokens) < 0.5)] if SINCE_0_33 else []),
        stale(MAX_REQS + 1),
        stale(MAX_REQS),
        stale(max_tokens, dtype=torch.int64),
        stale(max_tokens, dtype=torch.int64),
        stale(max_tokens, dtype=torch.int64),
        stale(max_drafts, dtype=torch.int64),
        stale(max_drafts, dtype=torch.int64),
        stale(max_drafts, dtype=torch.int64),
        stale(MAX_REQS, dtype=torch.float32),
        stale(MAX_REQS, dtype=torch.int64),
        torch.from_numpy(np.concatenate(positions)),
        batch.query_start_loc,
        batch.slots,
        tokens(rng, MAX_REQS, 1, dtype=torch.int64),
        tokens(rng, 1, MAX_REQS),
        int32(rng.integers(0, 3, batch.num_reqs)),
        int32(rng.integers(0, batch.query_lens)),
        temperatures(rng),
        seeds(rng),
        int32(rng.integers(0, 6, (MAX_REQS, max_blocks))),
        max_blocks,
        VOCAB - 1,
        block_size,
        num_queries,
        num_drafts,
        MAX_REQS,
        max_tokens,
        46,
        0,
    ]
    options = {
        "SAMPLE_FROM_ANCHOR": sample_from_anchor,
        "PAD_SLOT_ID": -1,
        "CP_SIZE": 1,
        "CP_INTERLEAVE": 1,
        "BLOCK_SIZE": 8,
    }
    return KernelInputs((batch.num_reqs, 3), args, options)
