"""`vocab_stream` for GPUs: one pass over the LM head's output, and one over what it leaves.

In the first, a program handles one row of one block: soft cap, temperature, largest logit, sums,
draw. It leaves five numbers, and overwrites the LM head's output with the scaled logits, rounded to
the model's type like the reference's. The expected embedding is computed from these.
"""

import math

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise.impossible import FP16_RANGE, MASKED_LOGIT, TRUNCATED_LOGIT
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.vocab_stream import _STAGE_BITS, BLOCK, VocabBlocks


class FusedVocabReader:
    """Does what `VocabReader` does on a GPU. Overwrites the LM head's output with the scaled
    logits, and collects the blocks of all tiles in one set of tensors."""

    def __init__(
        self,
        softcap: float | None,
        temperature: torch.Tensor,  # [rows, 1] fp32
        uniform: torch.Tensor,  # [rows] float64 in [0, 1)
        first_token: int,  # of the shard, a multiple of BLOCK
        num_tokens: int,  # of the shard
    ) -> None:
        # The rows of one canvas may share one number in memory.
        self._temperature = temperature.squeeze(-1).contiguous()
        self._softcap, self._uniform = softcap, uniform
        self._first_token, self._num_read = first_token, 0
        num_blocks = triton.cdiv(num_tokens, BLOCK)
        floats = temperature.new_empty(3, len(uniform), num_blocks)
        tokens = temperature.new_empty(2, len(uniform), num_blocks, dtype=torch.int64)
        maximum, total, weighted = floats
        best, candidate = tokens
        self._blocks = VocabBlocks(maximum, best, total, weighted, candidate)

    def read_tile(
        self,
        output: torch.Tensor,  # [rows, Vt] fp16, bf16 or fp32: the LM head's, overwritten
    ) -> tuple[torch.Tensor, VocabBlocks, None]:
        """Returns the tile's scaled logits, in the model's type and in the memory of `output`, and
        its blocks, a view of all blocks. The third result, weights, is None."""
        rows, width = output.shape
        first_block, num_blocks = self._num_read // BLOCK, triton.cdiv(width, BLOCK)
        _read_blocks_kernel[(rows, num_blocks)](
            output,
            self._temperature,
            self._uniform,
            *self._blocks,
            width,
            output.stride(0),
            self._blocks.maximum.shape[1],
            first_block,
            self._first_token + self._num_read,
            self._softcap or 0.0,
            HAS_SOFTCAP=bool(self._softcap),
            BLOCK=BLOCK,
            num_warps=1,
        )
        self._num_read += width
        tile = slice(first_block, first_block + num_blocks)
        return output, VocabBlocks(*(column[:, tile] for column in self._blocks)), None

    def blocks(self) -> VocabBlocks:
        """Returns the blocks of all tiles. Blocks of tiles that were not read yet are not set."""
        return self._blocks

    def join(self, blocks: VocabBlocks) -> RowStats:
        """Returns the rows' statistics over the whole vocabulary, from the blocks of all shards."""
        return join_blocks(blocks, self._uniform)


def join_blocks(blocks: VocabBlocks, uniform: torch.Tensor) -> RowStats:
    """Returns the result of `vocab_stream.join_blocks`, computed by a program for each row."""
    rows, num_blocks = blocks.maximum.shape
    stats = RowStats(
        best_guess=torch.empty_like(blocks.best[:, 0]),
        candidate=torch.empty_like(blocks.best[:, 0]),
        entropy_nats=blocks.maximum.new_empty(rows),
        best_logprob=blocks.maximum.new_empty(rows),
    )
    _join_blocks_kernel[(rows,)](
        *(column.contiguous() for column in blocks),  # of several shards, they lie in between
        uniform,
        *stats,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return stats


_MASKED, _LEFT_OUT = tl.constexpr(MASKED_LOGIT), tl.constexpr(TRUNCATED_LOGIT)
_STAGE_SCALE = tl.constexpr(2.0**_STAGE_BITS)
_LOG2_E = tl.constexpr(math.log2(math.e))
_FP16_LEAST, _FP16_MOST = (tl.constexpr(bound) for bound in FP16_RANGE)


# Not of `width`: as a multiple of 16, which it nearly always is, it lets logits be read eight at a
# time.
@triton.jit(
    do_not_specialize=["num_blocks", "first_block", "first_token"],
    do_not_specialize_on_alignment=["temperature", "uniform"],
)
def _read_blocks_kernel(
    output,  # [rows, Vt]
    temperature,  # [rows] fp32
    uniform,  # [rows] fp64 in [0, 1)
    maximum,  # [rows, num_blocks] fp32
    best,  # [rows, num_blocks] int64
    total,
    weighted,
    candidate,
    width,
    output_stride,
    num_blocks,  # of all tiles
    first_block,  # of this one
    first_token,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = block * BLOCK + lane
    is_token = column < width
    place = output + row * output_stride + column
    logit = tl.load(place, mask=is_token, other=0.0).to(tl.float32)
    scale = 1 / tl.load(temperature + row)
    if HAS_SOFTCAP:
        # tanh by way of exp, which every backend has. 1 - e is exact near 0, where 1 - 2 / (1 + e)
        # is not. The square of rsqrt is one division less.
        e = tl.exp2(tl.abs(logit) * (-2 * _LOG2_E / softcap))
        root = tl.rsqrt(1 + e)
        tanh = (1 - e) * root * root
        logit = tl.where(logit < 0, -tanh, tanh)
        scale *= softcap
    logit *= scale
    stored = logit
    if output.dtype.element_ty == tl.float16:  # as in `expected_embedding.round_logits`
        stored = tl.clamp(logit, _FP16_LEAST, _FP16_MOST)
    tl.store(place, stored.to(output.dtype.element_ty), mask=is_token)

    logit = tl.where(is_token, logit, _MASKED)  # 0 times it is a number
    top = tl.max(logit, 0)
    below = logit - top
    weight = tl.exp2(below * _LOG2_E)
    sum_of_weights = tl.sum(weight, 0)
    last = min(width - block * BLOCK, BLOCK) - 1
    # A row that holds a NaN has no answer, but must not point outside of the vocabulary.
    first_best = min(tl.min(tl.where(logit == top, lane, BLOCK), 0), last)
    cumulative = tl.cumsum(weight, 0)
    scaled = tl.load(uniform + row) * _STAGE_SCALE
    within = scaled - scaled.to(tl.int64).to(tl.float64)  # `vocab_stream.within_block`
    draw = within.to(tl.float32) * sum_of_weights
    # A scan that adds in pairs may grow where a weight is 0: such a token is never drawn. Where
    # rounding leaves none, the most probable one is.
    is_behind = (cumulative > draw) & (weight > 0)
    drawn = tl.min(tl.where(is_behind, lane, BLOCK), 0)
    drawn = tl.where(drawn == BLOCK, first_best, drawn)

    first = first_token + block * BLOCK
    entry = row * num_blocks + first_block + block
    tl.store(maximum + entry, top)
    tl.store(total + entry, sum_of_weights)
    tl.store(weighted + entry, tl.sum(weight * below, 0))
    tl.store(best + entry, (first + first_best).to(tl.int64))
    tl.store(candidate + entry, (first + drawn).to(tl.int64))


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["uniform"])
def _join_blocks_kernel(
    maximum,  # [rows, num_blocks] fp32
    best,  # [rows, num_blocks] int64
    total,
    weighted,
    candidate,
    uniform,  # [rows] fp64
    best_guess,  # [rows] int64
    drawn,
    entropy_nats,  # [rows] fp32
    best_logprob,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    entry = row * num_blocks + block
    largest = tl.load(maximum + entry, mask=is_block, other=_LEFT_OUT)
    total = tl.load(total + entry, mask=is_block, other=0.0)
    weighted = tl.load(weighted + entry, mask=is_block, other=0.0)

    behind = largest - tl.max(largest, 0)
    share = tl.exp(behind)
    mass = total * share
    sum_of_masses = tl.sum(mass, 0)
    log_total = tl.log(sum_of_masses)
    mean = tl.sum(share * (weighted + total * behind), 0) / sum_of_masses
    # A row that holds a NaN has no answer, but must not point outside of the vocabulary.
    first_best = min(tl.min(tl.where(behind == 0, block, BLOCKS), 0), num_blocks - 1)
    cumulative = tl.cumsum(mass, 0)
    draw = tl.load(uniform + row).to(tl.float32) * sum_of_masses
    # As in a block: what has no mass is never drawn.
    chosen = tl.min(tl.where((cumulative > draw) & (mass > 0), block, BLOCKS), 0)
    chosen = tl.where(chosen == BLOCKS, first_best, chosen)

    tl.store(best_guess + row, tl.load(best + row * num_blocks + first_best))
    tl.store(drawn + row, tl.load(candidate + row * num_blocks + chosen))
    tl.store(entropy_nats + row, log_total - mean)
    tl.store(best_logprob + row, -log_total)
