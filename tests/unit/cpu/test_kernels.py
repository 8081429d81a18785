"""Each native kernel against the Triton kernel it replaces, run in Triton's interpreter."""

import logging
from logging.handlers import MemoryHandler
from types import FunctionType

import numpy as np
import pytest
import torch

from tests import tolerances
from tests.unit.cpu.draft_kernel_inputs import CASES  # with what that file registers
from tests.unit.cpu.kernel_inputs import (
    MAX_LEN,
    MAX_REQS,
    RUNNER,
    SINCE_0_33,
    VOCAB,
    Batch,
    KernelInputs,
    addresses,
    inputs_of,
    int32,
    kernel_of,
    stale,
    tokens,
)
from vllm_dllm.cpu.kernels import NATIVE_KERNELS, CpuKernel, replace_kernels
from vllm_dllm.cpu.kernels.sampling import prompt_logprobs_token_ids

pytestmark = pytest.mark.numerics


@inputs_of("input_batch._prepare_prefill_inputs_kernel")
def prefill(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    num_lookahead = int(rng.integers(1, 4))
    prefill_lens = np.full(MAX_REQS, 1)
    prefill_lens[batch.slots] = batch.query_lens + rng.integers(0, 20, batch.num_reqs)
    computed = np.zeros(MAX_REQS, dtype=int)
    # From nothing computed to past the prefill.
    room = prefill_lens[batch.slots] - batch.query_lens
    computed[batch.slots] = rng.integers(0, room + 4)
    args = [
        stale(MAX_REQS * 12),
        stale(num_lookahead, MAX_REQS),
        MAX_REQS,
        num_lookahead,
        batch.slots,
        batch.query_start_loc,
        tokens(rng, MAX_REQS, MAX_LEN),
        MAX_LEN,
        int32(prefill_lens),
        int32(computed),
    ]
    options = {"BLOCK_SIZE": 8, "LOOKAHEAD_BLOCK": 4}
    return KernelInputs((batch.num_reqs,), args, options)


@inputs_of("input_batch._prepare_pos_seq_lens_kernel")
def positions(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    args = [
        stale(MAX_REQS * 12, dtype=torch.int64),
        stale(MAX_REQS),
        batch.slots,
        batch.query_start_loc,
        int32(rng.integers(0, 500, MAX_REQS)),
        MAX_REQS,
    ]
    return KernelInputs((batch.num_reqs + 1,), args, {"BLOCK_SIZE": 8})


@inputs_of(
    "input_batch._combine_sampled_and_draft_tokens_kernel",
    canvas=dict(num_new=0),
    next_token=dict(num_new=1),
)
def combine(rng: np.random.Generator, num_new: int) -> KernelInputs:
    batch = Batch.draw(rng, min_query_len=num_new)
    num_logits = rng.integers(num_new, batch.query_lens + 1)
    seq_lens = batch.query_lens + rng.integers(0, 20, batch.num_reqs)
    prefill_len = np.zeros(MAX_REQS, dtype=int)
    prefill_len[batch.slots] = seq_lens + rng.integers(-8, 3, batch.num_reqs)
    steps = 12
    args = [
        tokens(rng, MAX_REQS * 12),
        batch.slots,
        tokens(rng, MAX_REQS, 1, dtype=torch.int64),
        batch.query_start_loc,
        int32(seq_lens),
        int32(prefill_len),
        tokens(rng, MAX_REQS, steps, dtype=torch.int64),
        steps,
        int32(np.cumsum([0, *num_logits])),
        stale(int(num_logits.sum()) + 3, dtype=torch.int64),
    ]
    options = {"NUM_NEW_SAMPLED_TOKENS": num_new, "BLOCK_SIZE": 16}
    return KernelInputs((batch.num_reqs,), args, options)


@inputs_of("input_batch._get_num_sampled_and_rejected_kernel")
def sampled_and_rejected(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    num_logits = rng.integers(0, 12, batch.num_reqs)
    args = [
        int32(rng.integers(0, num_logits + 1)),
        stale(batch.num_reqs),
        int32(rng.integers(0, 20, batch.num_reqs)),
        int32(np.cumsum([0, *num_logits])),
        batch.slots,
        int32(rng.integers(0, 20, MAX_REQS)),
    ]
    return KernelInputs((batch.num_reqs,), args)


@inputs_of(
    "input_batch._post_update_kernel",
    plain={},
    penalties=dict(with_counts=True),
    no_queries=dict(with_counts=True, with_queries=False),
    skipping=dict(skip_some=True),
)
def outcome(
    rng: np.random.Generator,
    with_counts: bool = False,
    with_queries: bool = True,
    skip_some: bool = False,
) -> KernelInputs:
    batch = Batch.draw(rng)
    slots = batch.slots
    if skip_some:
        slots = torch.where(torch.from_numpy(rng.random(len(slots)) < 0.4), -1, slots)
    counts = tokens(rng, MAX_REQS, VOCAB) if with_counts else None
    # A denoise step samples nothing, a commit the whole canvas.
    num_sampled = np.where(rng.random(batch.num_reqs) < 0.5, 0, batch.query_lens)
    args = [
        slots,
        int32(rng.integers(0, 30, MAX_REQS)),
        tokens(rng, MAX_REQS, 1, dtype=torch.int64),
        counts,
        VOCAB if with_counts else 0,
        tokens(rng, batch.num_reqs, 12),
        12,
        int32(num_sampled),
        int32(batch.query_lens - num_sampled),
        batch.query_start_loc if with_queries else None,
        tokens(rng, MAX_REQS, MAX_LEN),
        MAX_LEN,
        int32(rng.integers(0, MAX_LEN - 12, MAX_REQS)),
    ]
    if SINCE_0_33:  # from another rank, drafts come along
        drafts = [tokens(rng, batch.num_reqs, 5), stale(MAX_REQS, 5)]
        args += [*drafts, 5] if with_queries else [None, None, 0]
    return KernelInputs((batch.num_reqs,), args, {"num_warps": 1})


@inputs_of("input_batch._post_update_num_computed_tokens_kernel")
def computed_tokens(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    args = [batch.slots, int32(rng.integers(0, 30, MAX_REQS)), batch.query_start_loc]
    return KernelInputs((batch.num_reqs,), args)


@inputs_of("input_batch._expand_idx_mapping_kernel")
def expand(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    args = [
        batch.slots,
        stale(batch.num_tokens, dtype=torch.int64),
        stale(batch.num_tokens),
        batch.query_start_loc[: batch.num_reqs + 1],
    ]
    return KernelInputs((batch.num_reqs,), args, {"BLOCK_SIZE": 16})


@inputs_of("block_table._gather_block_tables_kernel")
def gather(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    widths = [5, 11, 8][: int(rng.integers(1, 4))]
    sources = [tokens(rng, MAX_REQS, width) for width in widths]
    targets = [stale(MAX_REQS, width) for width in widths]
    num_blocks = int32(np.stack([rng.integers(0, width + 1, MAX_REQS) for width in widths]))
    num_rows = int(rng.integers(batch.num_reqs, MAX_REQS + 1))
    args = [
        batch.slots,
        addresses(sources),
        addresses(targets),
        torch.tensor(widths),
        num_blocks,
        MAX_REQS,
        batch.num_reqs,
    ]
    options: dict[str, int] = {"BLOCK_SIZE": 4}
    if SINCE_0_33:
        args += [
            int32(rng.integers(0, 50, MAX_REQS)),
            int32(rng.choice([0, 3, 16], len(widths))),
            int32(rng.choice([2, 4], len(widths))),
        ]
        options["MASK_SLIDING_WINDOW"] = bool(rng.integers(2))
    memory = [*sources, *targets]
    return KernelInputs((len(widths), num_rows), args, options, memory)


@inputs_of("block_table._compute_slot_mappings_kernel", all={}, dummies=dict(dummies=True))
def slot_mappings(rng: np.random.Generator, dummies: bool = False) -> KernelInputs:
    batch = Batch.draw(rng)
    slots = torch.full_like(batch.slots, -1) if dummies else batch.slots.clone()
    if dummies and rng.random() < 0.7:
        slots[0] = batch.slots[0]
    num_groups = int(rng.integers(1, 4))
    block_sizes = rng.choice([4, 8, 16], num_groups)
    enabled = rng.random(num_groups) < 0.8
    tables = [tokens(rng, MAX_REQS, MAX_LEN // 4) for _ in range(num_groups)]
    max_tokens = MAX_REQS * 12 + 3
    args = [
        max_tokens,
        slots,
        batch.query_start_loc,
        torch.from_numpy(rng.integers(0, MAX_LEN, max_tokens)),
        addresses(tables),
        torch.tensor([t.stride(0) for t in tables]),
        int32(block_sizes),
        torch.from_numpy(enabled),
        torch.ones(num_groups, dtype=torch.bool),
        stale(num_groups, max_tokens, dtype=torch.int64),
        max_tokens,
        0,
    ]
    options = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 8}
    return KernelInputs((num_groups, batch.num_reqs + 1), args, options, tables)


@inputs_of(
    "buffer_utils._apply_write_kernel",
    int32=dict(dtype=torch.int32),
    float32=dict(dtype=torch.float32),
    one_dimensional=dict(dtype=torch.int64, one_dimensional=True),
    groups=dict(dtype=torch.int32, num_groups=3),
)
def writes(
    rng: np.random.Generator, dtype: torch.dtype, one_dimensional: bool = False, num_groups: int = 0
) -> KernelInputs:
    num_writes = int(rng.integers(1, 6))
    width = 1 if one_dimensional else 20
    lengths = rng.integers(1, 1 + width if one_dimensional else 10, num_writes)
    # Later writes may land on earlier ones: the order counts.
    rows = rng.integers(0, MAX_REQS, num_writes)
    starts = rng.integers(0, width - lengths + 1)
    contents = tokens(rng, int(lengths.sum()) + 2, dtype=dtype)
    shape = (MAX_REQS,) if one_dimensional else (MAX_REQS, width)
    outputs = [stale(*shape, dtype=dtype) for _ in range(max(num_groups, 1))]
    groups = int32(rng.integers(0, num_groups, num_writes)) if num_groups else None
    if num_groups == 0:
        # Rows written twice by one launch would depend on the order of a GPU's blocks.
        rows = rng.permutation(MAX_REQS)[:num_writes]
    args = [
        addresses(outputs) if num_groups else outputs[0],
        torch.tensor([t.stride(0) for t in outputs]) if num_groups else outputs[0].stride(0),
        int32(rows),
        int32(starts),
        contents,
        int32(np.cumsum(lengths)),
        groups,
    ]
    options = {"BLOCK_SIZE": 4, "MULTI_GROUP": num_groups > 0}
    grid = (num_writes, -(-int(lengths.max()) // 4)) if SINCE_0_33 else (num_writes,)
    return KernelInputs(grid, args, options, outputs)


@inputs_of("sample.logprob._topk_log_softmax_kernel")
def topk_log_softmax(rng: np.random.Generator) -> KernelInputs:
    num_rows, topk = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    # Rows of a wider tensor, as after the padding of a vocabulary.
    logits = torch.from_numpy(10 * rng.standard_normal((num_rows, VOCAB + 6))).float()[:, :VOCAB]
    args = [
        stale(num_rows, topk, dtype=torch.float32),
        logits,
        VOCAB + 6,
        tokens(rng, num_rows, topk, dtype=torch.int64),
        topk,
        topk,
        VOCAB,
    ]
    return KernelInputs((num_rows,), args, {"BLOCK_SIZE": 16, "TOPK_BLOCK_SIZE": 4})


@inputs_of("sample.logprob._ranks_kernel")
def ranks(rng: np.random.Generator) -> KernelInputs:
    num_rows = int(rng.integers(1, 5))
    logits = torch.from_numpy(rng.integers(0, 9, (num_rows, VOCAB))).float()  # with ties
    args = [
        stale(num_rows, dtype=torch.int64),
        logits,
        VOCAB,
        tokens(rng, num_rows, dtype=torch.int64),
        VOCAB,
    ]
    return KernelInputs((num_rows,), args, {"BLOCK_SIZE": 16})


@inputs_of("sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_tokens(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    args = [
        stale(MAX_REQS * 12, dtype=torch.int64),
        batch.query_start_loc,
        batch.slots,
        int32(rng.integers(0, MAX_LEN - 13, MAX_REQS)),
        tokens(rng, MAX_REQS, MAX_LEN),
        MAX_LEN,
    ]
    return KernelInputs((batch.num_reqs,), args, {"BLOCK_SIZE": 8})


@inputs_of("structured_outputs._apply_grammar_bitmask_kernel")
def grammar(rng: np.random.Generator) -> KernelInputs:
    batch = Batch.draw(rng)
    stride = 12
    num_masks = int(rng.integers(1, 12))
    words = -(-VOCAB // 32)
    # Some masks are for rows that their request does not have this time.
    index = rng.integers(0, batch.num_reqs, num_masks) * stride + rng.integers(0, 12, num_masks)
    args = [
        torch.from_numpy(rng.standard_normal((max(batch.num_tokens, 1), VOCAB))).float(),
        VOCAB,
        int32(index),
        batch.query_start_loc[: batch.num_reqs + 1],
        torch.from_numpy(rng.integers(-(2**31), 2**31, (num_masks, words))).to(torch.int32),
        words,
        VOCAB,
    ]
    return KernelInputs((num_masks, 2), args, {"MASK_STRIDE": stride, "BLOCK_SIZE": 32})


# fp32 scores differ by the order of a sum over the vocabulary, or by a logarithm of a logarithm
# beside a logit; the rest not at all.
OF_NOISE = tolerances.SHORT * 40
ROUNDING = {
    "topk_log_softmax": 2 * tolerances.softmax(VOCAB, largest_logit=40.0),
    "gumbel_fp32": OF_NOISE,
    "gumbel_fp64": OF_NOISE,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_native_kernel_agrees_with_triton(case: str, seed: int) -> None:
    kernel_name, draw = CASES[case]
    kernel = kernel_of(kernel_name)
    ours, theirs = (draw(np.random.default_rng(seed)) for _ in range(2))
    assert kernel.native is not None
    kernel[ours.grid](*ours.args, **ours.options)
    kernel.interpret(theirs.grid, *theirs.args, **theirs.options)
    results = zip(ours.args + ours.memory, theirs.args + theirs.memory, strict=True)
    for index, (mine, triton_s) in enumerate(results):
        if isinstance(mine, torch.Tensor) and mine.dtype != torch.uint64:
            atol = ROUNDING.get(case, 0.0) if mine.is_floating_point() else 0.0
            torch.testing.assert_close(
                mine, triton_s, rtol=0.0, atol=atol, msg=lambda m, i=index: f"tensor {i}: {m}"
            )


def test_the_token_behind_the_last_slot_is_one_of_the_vocabulary() -> None:
    """Its request ends where the context ends; vLLM scores whatever stands in the buffer."""
    targets = torch.full((8,), 1 << 40)
    tokens = torch.arange(4 * 32, dtype=torch.int32).view(4, 32)
    prompt_logprobs_token_ids(
        targets, int32([0, 8]), torch.tensor([3]), int32([0, 0, 0, 24]), tokens, 32
    )
    assert targets.tolist() == [*range(3 * 32 + 25, 4 * 32), 0]


def test_every_native_kernel_has_a_case() -> None:
    tested = {f"{RUNNER}.{kernel}" for kernel, _ in CASES.values()}
    assert tested == set(NATIVE_KERNELS)


def test_a_kernel_without_native_version_is_interpreted_and_says_so_once() -> None:
    kernel_of("sample.min_p._min_p_kernel")
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    logger, said = logging.getLogger("vllm_dllm"), MemoryHandler(capacity=100)
    logger.addHandler(said)
    try:
        for _ in range(2):
            logits = torch.arange(6.0).reshape(2, 3)
            apply_min_p(logits, torch.tensor([1, 0]), torch.tensor([0.0, 0.5]))
            assert logits.tolist() == [[-torch.inf, -torch.inf, 2.0], [3.0, 4.0, 5.0]]
    finally:
        logger.removeHandler(said)
    (message,) = [record.getMessage() for record in said.buffer]
    assert "sample.min_p._min_p_kernel" in message


def test_copies_in_other_modules_are_replaced_too() -> None:
    kernel_of("buffer_utils._load_ptr")
    from vllm.v1.worker.gpu import block_table, buffer_utils

    assert isinstance(buffer_utils._load_ptr, CpuKernel)
    assert block_table._load_ptr is buffer_utils._load_ptr


def test_functions_that_are_no_kernels_stay() -> None:
    replace_kernels()
    from vllm.v1.worker.gpu import input_batch

    assert isinstance(input_batch.post_update, FunctionType)
