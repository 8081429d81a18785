"""The statistics of `row_stats` from vocabulary tiles that arrive one by one: no tensor is as wide
as the vocabulary.

Each tile leaves five numbers per row and block of 1024 tokens, which do not depend on how blocks
are grouped into tiles. The candidate is drawn in two stages: a block by its share, then a token in
it.

Legend: Vt = tokens of a tile, B = blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_dllm.denoise.impossible import TRUNCATED_LOGIT
from vllm_dllm.denoise.row_stats import RowStats, argmax, sample_by_inversion

BLOCK = 1024
"""Tokens per block. Tiles and shards of the vocabulary begin at multiples of it."""
STREAMED_FROM = 16 * BLOCK
"""Vocabularies of at least this many tokens are streamed."""
_STAGE_BITS = 27  # of a draw's 53 bits, to choose a block; the rest choose a token in it


class VocabBlocks(NamedTuple):
    """Statistics of each row's blocks of the vocabulary; all fields are [rows, B]."""

    maximum: torch.Tensor  # fp32, largest logit m
    best: torch.Tensor  # int64, its token
    total: torch.Tensor  # fp32, sum of exp(logit - m)
    weighted: torch.Tensor  # fp32, sum of exp(logit - m) * (logit - m)
    candidate: torch.Tensor  # int64, a token drawn from the block


class VocabReader:
    """Computes the statistics of some rows from the LM head's output, which comes tile by tile from
    a shard's first token on."""

    def __init__(
        self,
        cap: Callable[[torch.Tensor], torch.Tensor],  # LM head's output -> logits, fp32 copies
        temperature: torch.Tensor,  # [rows, 1] fp32
        uniform: torch.Tensor,  # [rows] float64 in [0, 1)
        first_token: int,  # of the shard, a multiple of BLOCK
    ) -> None:
        self._cap, self._temperature, self._uniform = cap, temperature, uniform
        self._next = first_token
        self._found: list[VocabBlocks] = []

    def read_tile(
        self,
        output: torch.Tensor,  # [rows, Vt] the LM head's; a multiple of BLOCK wide unless the last
    ) -> tuple[torch.Tensor, VocabBlocks, torch.Tensor | None]:
        """Returns the tile's scaled logits [rows, Vt] fp32, the statistics of its blocks, and the
        weights that `read_blocks` returns."""
        logits = self._cap(output).div_(self._temperature)
        blocks, weights = read_blocks(logits, self._uniform, self._next)
        self._next += output.shape[1]
        self._found.append(blocks)
        return logits, blocks, weights

    def blocks(self) -> VocabBlocks:
        """Returns the blocks of all tiles read so far."""
        return VocabBlocks(*(torch.cat(column, 1) for column in zip(*self._found, strict=True)))

    def join(self, blocks: VocabBlocks) -> RowStats:
        """Returns the rows' statistics over the whole vocabulary, from the blocks of all shards."""
        return join_blocks(blocks, self._uniform)


def within_block(uniform: torch.Tensor) -> torch.Tensor:
    """Returns [rows] float64 in [0, 1): the part of each draw that chooses a token in a block."""
    return (uniform * 2.0**_STAGE_BITS).frac()


def read_blocks(
    logits: torch.Tensor,  # [rows, Vt] fp32, temperature-scaled
    uniform: torch.Tensor,  # [rows] float64 in [0, 1)
    first_token: int,  # of the tile, a multiple of BLOCK
) -> tuple[VocabBlocks, torch.Tensor]:
    """Returns the statistics of a tile's blocks, and exp(logit - m) [rows, B, BLOCK] fp32, where m
    is the largest logit of the block."""
    rows, width = logits.shape
    padding = -width % BLOCK
    if padding:
        logits = F.pad(logits, (0, padding), value=TRUNCATED_LOGIT)
    blocks = logits.view(rows, -1, BLOCK)
    best = argmax(blocks)
    maximum = blocks.gather(-1, best[..., None])
    below = blocks - maximum
    weights = below.exp()
    within = within_block(uniform)
    drawn = sample_by_inversion(
        weights.flatten(0, 1), within[:, None].expand(rows, blocks.shape[1]).reshape(-1)
    )
    first = first_token + BLOCK * torch.arange(blocks.shape[1], device=logits.device)
    found = VocabBlocks(
        maximum=maximum.squeeze(-1),
        best=best + first,
        total=weights.sum(dim=-1),
        weighted=below.mul_(weights).sum(dim=-1),
        # Padding can be drawn only from rows with a NaN.
        candidate=(drawn.view(rows, -1) + first).clamp_(max=first_token + width - 1),
    )
    return found, weights


def join_blocks(blocks: VocabBlocks, uniform: torch.Tensor) -> RowStats:
    """Returns statistics [rows] over the whole vocabulary, given its blocks in their order."""
    top, where = blocks.maximum.max(dim=-1, keepdim=True)  # the first of equals
    behind = blocks.maximum - top
    share = behind.exp()
    masses = blocks.total * share
    total = masses.sum(dim=-1)
    log_total = total.log()
    mean = (share * (blocks.weighted + blocks.total * behind)).sum(dim=-1) / total
    chosen = sample_by_inversion(masses, uniform)[:, None]
    return RowStats(
        best_guess=blocks.best.gather(-1, where).squeeze(-1),
        candidate=blocks.candidate.gather(-1, chosen).squeeze(-1),
        entropy_nats=log_total - mean,
        best_logprob=-log_total,
    )
