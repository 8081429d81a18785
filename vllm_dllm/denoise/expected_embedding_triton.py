"""The expected embedding's products for GPUs: `expected_embedding.add_needed_` without the host
knowing which blocks are needed, and the weights of the whole product in one pass."""

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise.vocab_stream import BLOCK

_ROWS, _HIDDEN, _TOKENS = 64, 128, 64
_WEIGHED = 4096  # tokens of a row at a time


def weigh_(
    logits: torch.Tensor,  # [rows, Vt] fp16, bf16 or fp32, overwritten
    maximum: torch.Tensor,  # [rows] fp32, not below any of the row's logits
    totals: torch.Tensor,  # [rows] fp32, changed in place
) -> torch.Tensor:
    """`exp(logits - maximum)` [rows, Vt] in the logits' type and in their place. Adds its sums, not
    rounded, to the totals. A logit is read once and written once."""
    _weigh_kernel[(len(logits),)](
        logits,
        maximum,
        totals,
        logits.shape[1],
        logits.stride(0),
        BLOCK=_WEIGHED,
        num_warps=8,
    )
    return logits


def add_needed_(
    sums: torch.Tensor,
    totals: torch.Tensor,
    logits: torch.Tensor,
    maximum: torch.Tensor,
    needed: torch.Tensor,
    embeddings: torch.Tensor,
) -> None:
    """A program handles 64 rows and 128 columns of the embeddings, and skips the blocks that none
    of its rows needs."""
    rows, hidden_size = sums.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(hidden_size, _HIDDEN))
    _add_needed_kernel[grid](
        sums,
        totals,
        logits,
        maximum,
        needed.to(torch.int32),
        embeddings,
        rows,
        hidden_size,
        len(embeddings),
        needed.shape[1],
        sums.stride(0),
        logits.stride(0),
        embeddings.stride(0),
        BLOCK=BLOCK,
        ROWS=_ROWS,
        HIDDEN=_HIDDEN,
        TOKENS=_TOKENS,
    )


@triton.jit
def _weigh_kernel(
    logits,  # [rows, Vt]
    maximum,  # [rows] fp32
    totals,  # [rows] fp32
    width,
    logits_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(maximum + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        token = first + tl.arange(0, BLOCK)
        place = logits + row * logits_stride + token
        logit = tl.load(place, mask=token < width, other=0.0).to(tl.float32)
        weight = tl.where(token < width, tl.exp(logit - top), 0.0)
        total += weight
        tl.store(place, weight.to(logits.dtype.element_ty), mask=token < width)
    tl.store(totals + row, tl.load(totals + row) + tl.sum(total, 0))


# Not of `width`: as a multiple of 16, which it nearly always is, it lets logits be read eight at a
# time, and embeddings without waiting.
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _add_needed_kernel(
    sums,  # [rows, H] fp32
    totals,  # [rows] fp32
    logits,  # [rows, Vt]
    maximum,  # [rows] fp32
    needed,  # [rows, num_blocks] int32
    embeddings,  # [Vt, H]
    num_rows,
    hidden_size,
    width,
    num_blocks,
    sums_stride,
    logits_stride,
    embeddings_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    is_row, is_column = row < num_rows, column < hidden_size
    top = tl.load(maximum + row, mask=is_row, other=0.0)
    row_logits = logits + row[:, None].to(tl.int64) * logits_stride
    product = tl.zeros((ROWS, HIDDEN), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for block in range(num_blocks):
        is_needed = tl.load(needed + row * num_blocks + block, mask=is_row, other=0)
        if tl.max(is_needed, 0) > 0:
            for first in range(0, BLOCK, TOKENS):
                token = block * BLOCK + first + tl.arange(0, TOKENS)
                is_token = token < width
                used = (is_needed > 0)[:, None] & is_token[None, :]
                logit = tl.load(row_logits + token[None, :], mask=used, other=0.0)
                # Round to the model's type, as the reference does.
                logit = logit.to(embeddings.dtype.element_ty).to(tl.float32)
                weight = tl.where(used, tl.exp(logit - top[:, None]), 0.0)
                total += tl.sum(weight, 1)
                embedding = tl.load(
                    embeddings + token[:, None].to(tl.int64) * embeddings_stride + column[None, :],
                    mask=is_token[:, None] & is_column[None, :],
                    other=0.0,
                )
                product = tl.dot(
                    weight.to(embedding.dtype), embedding, product, input_precision="ieee"
                )
    place = sums + row[:, None].to(tl.int64) * sums_stride + column[None, :]
    written = is_row[:, None] & is_column[None, :]
    tl.store(place, tl.load(place, mask=written, other=0.0) + product, mask=written)
    if tl.program_id(1) == 0:
        tl.store(totals + row, tl.load(totals + row, mask=is_row, other=0.0) + total, mask=is_row)
