"""`expected_embedding` for GPUs: the product's weights in one pass, and `add_needed_` without
telling the host which blocks are needed."""

import math

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise.impossible import FP16_RANGE, MASKED_LOGIT
from vllm_dllm.denoise.vocab_stream import BLOCK, VocabBlocks

_ROWS, _HIDDEN, _TOKENS = 64, 128, 64
_WEIGHED = 8192  # tokens of a row at a time
_ADDED = 1024  # channels of a row that a program adds
_LOWEST = tl.constexpr(MASKED_LOGIT)
_LOG2_E = tl.constexpr(math.log2(math.e))
_FP16_MOST = tl.constexpr(FP16_RANGE[1])


class FusedExpectedEmbedding:
    """Computes `ExpectedEmbedding` without a tolerance, for logits in the embeddings' type: one
    kernel computes the weights, and one matrix product reads them."""

    def __init__(self, rows: int, num_tokens: int, device: torch.device) -> None:
        """`num_tokens`: the tokens of all tiles."""
        # Of the most blocks a tile can have: tiles of a step of few rows are wider, and a kernel
        # for each width would be compiled while requests wait.
        self._blocks = triton.next_power_of_2(triton.cdiv(num_tokens, BLOCK))
        # [rows] each: the largest logit so far, the sum of weights, what both were scaled by last.
        self._maximum, self._total, self._decay = torch.empty(
            3, rows, dtype=torch.float32, device=device
        )
        self._sum: torch.Tensor | None = None  # [rows, H]

    def add_tile(
        self,
        logits: torch.Tensor,  # [rows, Vt] overwritten with the weights
        blocks: VocabBlocks,
        weights: torch.Tensor | None,
        embeddings: torch.Tensor,  # [Vt, H] of the same type
    ) -> None:
        """Adds the next tile to the sums. Overwrites `logits`, and does not read `weights`."""
        maximum = blocks.maximum
        _weigh_kernel[(len(logits),)](
            logits,
            maximum,
            self._maximum,
            self._total,
            self._decay,
            logits.shape[1],
            logits.stride(0),
            maximum.shape[1],
            maximum.stride(0),
            IS_FIRST=self._sum is None,
            BLOCK=_WEIGHED,
            BLOCKS=self._blocks,
            num_warps=16,
        )
        product = torch.matmul(logits, embeddings)
        if self._sum is None:
            self._sum = product
            return
        before, width = self._sum, product.shape[1]
        if before.dtype != torch.float32:
            self._sum = before.new_empty(before.shape, dtype=torch.float32)
        _add_kernel[len(product), triton.cdiv(width, _ADDED)](
            before, product, self._decay, self._sum, width, BLOCK=_ADDED
        )

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what `ExpectedEmbedding.result` does. After a single tile, the sum is in the
        model's type."""
        assert self._sum is not None, "no tile has been added"
        return self._sum, self._total, self._maximum


def add_needed_(
    sums: torch.Tensor,
    totals: torch.Tensor,
    logits: torch.Tensor,
    maximum: torch.Tensor,
    needed: torch.Tensor,
    embeddings: torch.Tensor,
) -> None:
    """Does what `expected_embedding.add_needed_` does, without waiting for the device. A program
    handles 64 rows and 128 columns of the embeddings, and skips the blocks that none of its rows
    needs."""
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


# `blocks` begins wherever its tile does, and the others behind as many numbers as there are rows.
@triton.jit(
    do_not_specialize=["num_blocks", "pitch"],
    do_not_specialize_on_alignment=["blocks", "maximum", "totals", "decay"],
)
def _weigh_kernel(
    logits,  # [rows, Vt]
    blocks,  # [rows, num_blocks] fp32, largest logits; rows are `pitch` apart
    maximum,  # [rows] fp32
    totals,  # [rows] fp32
    decay,  # [rows] fp32
    width,
    logits_stride,
    num_blocks,
    pitch,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A logit is read once, and its weight written once in its place; sums are of weights that are
    not rounded."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(blocks + row * pitch + block, mask=block < num_blocks, other=_LOWEST), 0)
    # Rounded like the logits: at low temperatures that moves one so far that its weight would be 0
    # or infinite beside one that is not.
    if logits.dtype.element_ty == tl.float16:
        top = tl.minimum(top, _FP16_MOST)
    top = tl.maximum(top.to(logits.dtype.element_ty).to(tl.float32), _LOWEST)
    before = 0.0
    if not IS_FIRST:
        earlier = tl.load(maximum + row)
        top = tl.maximum(top, earlier)
        scale = tl.exp(earlier - top)
        tl.store(decay + row, scale)
        before = tl.load(totals + row) * scale
    tl.store(maximum + row, top)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        token = first + tl.arange(0, BLOCK)
        place = logits + row * logits_stride + token
        logit = tl.load(place, mask=token < width, other=0.0).to(tl.float32)
        weight = tl.where(token < width, tl.exp2((logit - top) * _LOG2_E), 0.0)
        total += weight
        tl.store(place, weight.to(logits.dtype.element_ty), mask=token < width)
    tl.store(totals + row, before + tl.sum(total, 0))


@triton.jit(do_not_specialize_on_alignment=["decay"])
def _add_kernel(
    before,  # [rows, width]
    product,  # [rows, width]
    decay,  # [rows] fp32
    found,  # [rows, width] fp32, `before` times `decay`, and `product`; may be `before`
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, is_channel = row * width + channel, channel < width
    total = tl.load(before + place, mask=is_channel, other=0.0).to(tl.float32)
    added = tl.load(product + place, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(found + place, total * tl.load(decay + row) + added, mask=is_channel)


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
