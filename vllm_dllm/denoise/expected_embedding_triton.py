"""`expected_embedding.add_needed_` for GPUs, without the host knowing which blocks are needed."""

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise.vocab_stream import BLOCK

_ROWS, _HIDDEN, _TOKENS = 64, 128, 64


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


@triton.jit(do_not_specialize=["num_rows", "width", "num_blocks"])
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
