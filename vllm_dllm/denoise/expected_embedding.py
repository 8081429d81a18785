"""`softmax(logits) @ E` from vocabulary tiles that arrive one by one, exact or within a tolerance.

Legend: Vt = tokens of a tile, B = its blocks of `BLOCK` tokens, H = hidden size.
"""

import torch

from vllm_dllm.denoise.impossible import FP16_RANGE, MASKED_LOGIT
from vllm_dllm.denoise.vocab_stream import BLOCK, VocabBlocks

_MARGIN = 0.5
"""The share of the tolerance that may be left out; the rest allows for the rounding of sums."""


def round_logits(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `logits` rounded to `dtype`, which stay finite in it, as fp32."""
    if dtype == torch.float16:
        logits = logits.clamp(*FP16_RANGE)
    return logits.to(dtype).float()


class ExpectedEmbedding:
    """The expected embedding of rows whose logits arrive tile by tile. Sums are rescaled as the
    largest logit so far grows, as in online softmax.

    With a tolerance, the product leaves out blocks of a row that hold less than an even share of
    the tolerance. So no row misses more probability than `tolerance`, and no embedding is off by
    more than that times the longest row of E. How much of a row's total is known when a block
    arrives depends on the tiles and on the floor, so both affect the result, within the tolerance.
    The LM head and the product round logits to the model's type. This is allowed for: at low
    temperatures, less is left out in a 16-bit type.
    """

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        device: torch.device,
        tolerance: float = 0.0,
        num_blocks: int = 1,  # in the whole vocabulary
        floor: torch.Tensor | None = None,  # [rows] fp32, the logit of any token of each row
    ) -> None:
        self._sum = torch.zeros(rows, hidden_size, device=device)
        self._total = torch.zeros(rows, device=device)
        self._maximum = torch.full((rows,), MASKED_LOGIT, device=device)
        self._floor = self._maximum if floor is None else floor
        self._known = torch.zeros_like(self._total)  # of the total, before rounding
        self._least_share = _MARGIN * tolerance / num_blocks

    def add_tile(
        self,
        logits: torch.Tensor,  # [rows, Vt] temperature-scaled, fp32 or in the embeddings' type
        blocks: VocabBlocks,
        weights: torch.Tensor | None,  # [rows, B, BLOCK] fp32, from `read_blocks`, if available
        embeddings: torch.Tensor,  # [Vt, H] the model's type
    ) -> None:
        """Adds the next tile to the sums. Like the reference, it first rounds the logits to the
        model's type, and rounds the weights again for the product."""
        # Rounded, too: at low temperatures rounding moves a logit so far that its weight would be 0
        # or infinite beside one that is not.
        largest = round_logits(blocks.maximum.amax(dim=-1), embeddings.dtype)
        maximum = torch.maximum(self._maximum, largest)
        if self._least_share:
            maximum = torch.maximum(maximum, self._lowered_floor(embeddings.dtype))
        decay = (self._maximum - maximum).exp()
        self._total.mul_(decay)
        self._known.mul_(decay)
        self._sum.mul_(decay[:, None])
        self._maximum = maximum
        if self._least_share:
            self._add_needed(logits, blocks, embeddings)
            return
        if weights is not None and embeddings.dtype == torch.float32:
            scaled = weights * (blocks.maximum - maximum[:, None]).exp()[..., None]
            scaled = scaled.flatten(1)[:, : logits.shape[1]]
        else:
            scaled = (round_logits(logits, embeddings.dtype) - maximum[:, None]).exp_()
        self._total.add_(scaled.sum(dim=-1))
        self._sum.add_(torch.matmul(scaled.to(embeddings.dtype), embeddings))

    def _add_needed(
        self, logits: torch.Tensor, blocks: VocabBlocks, embeddings: torch.Tensor
    ) -> None:
        """Adds the blocks whose share of the row's total may matter. The other blocks count in the
        total alone. The total is bounded from below by the blocks so far, or by the floor's token,
        and lowered by what rounding logits to the embeddings' type may have added."""
        largest = round_logits(blocks.maximum, embeddings.dtype)
        masses = blocks.total * (largest - self._maximum[:, None]).exp()
        self._known.add_(masses.sum(dim=-1))
        floor = self._lowered_floor(embeddings.dtype)
        known = torch.maximum(self._known, (floor - self._maximum).exp())
        # Of a block's largest logit and of each other one, in its mass and in all of them.
        known = known * (-4 * _rounding(embeddings.dtype) * self._maximum.abs()).exp()
        needed = masses > self._least_share * known[:, None]
        self._total.add_(masses.masked_fill(needed, 0.0).sum(dim=-1))
        if logits.is_cuda:
            from vllm_dllm.denoise.expected_embedding_triton import add_needed_ as add_needed
        else:
            add_needed = add_needed_
        add_needed(self._sum, self._total, logits, self._maximum, needed, embeddings)

    def _lowered_floor(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns [rows] fp32: what the floor's token has at least, computed and rounded again."""
        return round_logits(self._floor - 4 * _rounding(dtype) * self._floor.abs(), dtype)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns sum [rows, H], total [rows] and maximum [rows] over one shard of the vocabulary,
        all fp32. They are joined with those of other shards. The embedding is sum / total."""
        return self._sum, self._total, self._maximum


def _rounding(dtype: torch.dtype) -> float:
    """Returns by which share of it a logit may be off, rounded to `dtype`."""
    return torch.finfo(dtype).eps / 2


def add_needed_(
    sums: torch.Tensor,  # [rows, H] fp32, changed in place
    totals: torch.Tensor,  # [rows] fp32, changed in place
    logits: torch.Tensor,  # [rows, Vt] fp32 or in the embeddings' type
    maximum: torch.Tensor,  # [rows] fp32, not below any of the row's logits
    needed: torch.Tensor,  # [rows, B] bool
    embeddings: torch.Tensor,  # [Vt, H]
) -> None:
    """Adds `exp(logits - maximum)` over the needed blocks to the totals, and its product with the
    blocks' embeddings to the sums, both in place. Waits for the device."""
    for block in range(needed.shape[1]):
        rows = needed[:, block].nonzero().squeeze(-1)
        if len(rows) == 0:
            continue
        tokens = slice(block * BLOCK, min((block + 1) * BLOCK, len(embeddings)))
        weights = round_logits(logits[:, tokens][rows], embeddings.dtype)
        weights.sub_(maximum[rows, None]).exp_()
        totals.index_add_(0, rows, weights.sum(dim=-1))
        product = torch.matmul(weights.to(embeddings.dtype), embeddings[tokens])
        sums.index_add_(0, rows, product.float())


class TopTokens:
    """Keeps the k most probable tokens of rows whose logits arrive tile by tile."""

    def __init__(self, k: int, first_token: int) -> None:
        """`first_token`: of the first tile."""
        self.k, self._next = k, first_token
        self._best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # see `result`

    def add_tile(
        self,
        logits: torch.Tensor,  # [rows, Vt]
        blocks: VocabBlocks,
        weights: torch.Tensor | None,
        embeddings: torch.Tensor,
    ) -> None:
        """Merges the next tile's most probable tokens with earlier ones. Reads only `logits`."""
        top = logits.topk(min(self.k, logits.shape[1]), dim=-1)
        best, tokens = top.values.float(), top.indices + self._next
        self._next += logits.shape[1]
        log_total = logits.float().logsumexp(dim=-1, keepdim=True)
        if self._best is not None:
            earlier, earlier_tokens, earlier_total = self._best
            log_total = torch.logaddexp(earlier_total, log_total)
            best, tokens = top_k_tokens(
                torch.cat((earlier, best), dim=-1),
                torch.cat((earlier_tokens, tokens), dim=-1),
                self.k,
            )
        self._best = best, tokens, log_total

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits [rows, k] fp32 and tokens [rows, k] int64, the most probable first, and
        the logsumexp [rows, 1] fp32 over all tiles. There are fewer columns for fewer tokens."""
        assert self._best is not None, "no tile has been added"
        return self._best


def top_k_tokens(
    logits: torch.Tensor,  # [rows, n] fp32
    tokens: torch.Tensor,  # [rows, n] int64
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest logits of each row and their tokens, [rows, min(k, n)] each."""
    top = logits.topk(min(k, logits.shape[1]), dim=-1)
    return top.values, tokens.gather(-1, top.indices)
