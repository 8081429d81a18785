"""`vocab_stream.read_blocks` for GPUs: one pass over the LM head's output.

A program handles one row of one block: soft cap, temperature, largest logit, sums, draw. It leaves
five numbers, and overwrites the LM head's output with the scaled logits, rounded to the model's
type like the reference's. The expected embedding is computed from these.
"""

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise.vocab_stream import _STAGE_BITS, BLOCK, VocabBlocks


def read_blocks_(
    output: torch.Tensor,  # [rows, Vt] fp16, bf16 or fp32: the LM head's output, overwritten
    temperature: torch.Tensor,  # [rows] fp32
    uniform: torch.Tensor,  # [rows] float64 in [0, 1)
    first_token: int,  # of the tile, a multiple of BLOCK
    softcap: float | None,
) -> VocabBlocks:
    rows, width = output.shape
    num_blocks = triton.cdiv(width, BLOCK)
    floats = output.new_empty(3, rows, num_blocks, dtype=torch.float32)
    tokens = output.new_empty(2, rows, num_blocks, dtype=torch.int64)
    within = (uniform * 2.0**_STAGE_BITS).frac().float()
    _read_blocks_kernel[(rows, num_blocks)](
        output,
        temperature,
        within,
        *floats,
        *tokens,
        width,
        output.stride(0),
        num_blocks,
        first_token,
        softcap or 0.0,
        HAS_SOFTCAP=bool(softcap),
        BLOCK=BLOCK,
    )
    maximum, total, weighted = floats
    best, candidate = tokens
    return VocabBlocks(maximum, best, total, weighted, candidate)


# Not of `width`: as a multiple of 16, which it nearly always is, it lets logits be read eight at a
# time.
@triton.jit(do_not_specialize=["num_blocks", "first_token"])
def _read_blocks_kernel(
    output,  # [rows, Vt]
    temperature,  # [rows] fp32
    within,  # [rows] fp32 in [0, 1)
    maximum,  # [rows, num_blocks] fp32
    total,
    weighted,
    best,  # [rows, num_blocks] int64
    candidate,
    width,
    output_stride,
    num_blocks,
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
    if HAS_SOFTCAP:
        # tanh by way of exp, which every backend has
        e = tl.exp(tl.abs(logit / softcap) * -2)
        tanh = (1 - e) / (1 + e)
        logit = tl.where(logit < 0, -tanh, tanh) * softcap
    logit = logit / tl.load(temperature + row)
    tl.store(place, logit.to(output.dtype.element_ty), mask=is_token)

    logit = tl.where(is_token, logit, -1e20)  # excluded, and 0 times it is a number
    top = tl.max(logit, 0)
    below = logit - top
    weight = tl.exp(below)
    sum_of_weights = tl.sum(weight, 0)
    last = min(width - block * BLOCK, BLOCK) - 1
    # A row that holds a NaN has no answer, but must not point outside of the vocabulary.
    first_best = min(tl.min(tl.where(logit == top, lane, BLOCK), 0), last)
    cumulative = tl.cumsum(weight, 0)
    draw = tl.load(within + row) * sum_of_weights
    # A scan that adds in pairs may grow where a weight is 0: such a token is never drawn. Where
    # rounding leaves none, the most probable one is.
    is_behind = (cumulative > draw) & (weight > 0)
    drawn = tl.min(tl.where(is_behind, lane, BLOCK), 0)
    drawn = tl.where(drawn == BLOCK, first_best, drawn)

    first = first_token + block * BLOCK
    entry = row * num_blocks + block
    tl.store(maximum + entry, top)
    tl.store(total + entry, sum_of_weights)
    tl.store(weighted + entry, tl.sum(weight * below, 0))
    tl.store(best + entry, (first + first_best).to(tl.int64))
    tl.store(candidate + entry, (first + drawn).to(tl.int64))
