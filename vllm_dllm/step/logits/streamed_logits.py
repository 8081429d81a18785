"""The logits of a step's canvases where the vocabulary is large: they are never all held at once.

The sampler gets hidden states and reads the vocabulary tile by tile, so its memory does not grow
with the number of requests. For a request whose sampling parameters need whole rows, these are
computed some rows at a time. This depends on the request alone, so its answer does not depend on
its neighbours.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.vocab_stream import BLOCK, VocabBlocks, VocabReader
from vllm_dllm.step.logits.canvas_logits import (
    BYTES_PER_WHOLE_LOGIT,
    LogitTools,
    ReadRows,
    RowMasks,
    concat_rows,
    read_rows,
    rows_within_budget,
    tiles,
)
from vllm_dllm.step.logits.filters import RuleContext

if TYPE_CHECKING:
    from vllm_dllm.denoise.vocab_stream_triton import FusedVocabReader

TILE_TOKENS = 16 * BLOCK
CACHED_TILE = (256, 4 * BLOCK)
"""Most rows and tokens of a tile on CPUs. A dozen passes go over its 4 MiB of logits, which fit
caches; over tiles of 16 MiB they take twice as long."""
# fp32: logit, scaled, below its block's largest, weight, cumulative, rounded, for the product
_BYTES_PER_STREAMED_LOGIT = 7 * 4
# The same, and the statistics of a row's other tiles: 28 bytes for 1,024 logits of the vocabulary
_BYTES_PER_CACHED_LOGIT = 8 * 4
_FUSED_COPIES = 2  # of a logit: GPU kernels work in place; as much again is for products


def tile_shape(
    rows: int,
    budget_bytes: int,
    fused_bytes: int | None,  # bytes of a logit in fused kernels; None: there are none
    on_cpu: bool = False,
) -> tuple[int, int]:
    """Returns how many rows and tokens a streamed tile has. On a GPU, a tile of few rows gets as
    many tokens as fit the budget, because launches cost more than such tiles."""
    num_bytes = _streamed_bytes(fused_bytes, on_cpu)
    if fused_bytes is None:
        most_rows, tokens = CACHED_TILE if on_cpu else (rows, TILE_TOKENS)
        return max(1, min(most_rows, budget_bytes // (tokens * num_bytes))), tokens
    tile_rows = max(1, min(rows, budget_bytes // (TILE_TOKENS * num_bytes)))
    tokens = budget_bytes // (tile_rows * num_bytes) // BLOCK * BLOCK
    return tile_rows, max(TILE_TOKENS, tokens)


def _streamed_bytes(fused_bytes: int | None, on_cpu: bool) -> int:
    """Returns the bytes of memory that one logit of a streamed tile takes."""
    if fused_bytes is not None:
        return fused_bytes
    return _BYTES_PER_CACHED_LOGIT if on_cpu else _BYTES_PER_STREAMED_LOGIT


class StreamedLogits:
    """`CanvasLogits` made of hidden states [rows, H]."""

    def __init__(self, hidden: torch.Tensor, context: RuleContext, tools: LogitTools) -> None:
        self.hidden, self.context, self.batch = hidden, context, context.batch
        self.soft, self.filters, self.memory = tools
        self.model = self.soft.model
        self._masks: dict[int, RowMasks] = {}

    def exclude(self, i: int, masks: RowMasks) -> None:
        self._masks[i] = masks

    def row(self, i: int, position: int) -> torch.Tensor:
        """Computes the logits of one position, and applies the rules that need no other row."""
        row = self.batch.rows_of(i).start + position
        logits = self.model.compute_logits(self.hidden[row : row + 1])
        rules = self.filters.rules_of_request(i, self.batch)
        rules.apply_(logits, position, self.context.starts[i], self.context.guesses[i])
        return logits[0]

    def raw(self, i: int) -> Iterator[torch.Tensor]:
        """Computes the logits of canvas i, as many rows at a time as fit the memory budget."""
        vocab_size, of_canvas = self.model.config.vocab_size, self.batch.rows_of(i)
        tile_rows = rows_within_budget(vocab_size, self.memory.budget_bytes)
        most_rows = min(tile_rows, of_canvas.stop - of_canvas.start)
        self.memory.record(most_rows * vocab_size * BYTES_PER_WHOLE_LOGIT)
        for rows in tiles(of_canvas, tile_rows):
            yield self.model.compute_logits(self.hidden[rows])

    def processed(self, i: int) -> Iterator[torch.Tensor]:
        """Applies the request's rules and the excluded tokens to the logits of `raw`."""
        rules = self.filters.rules_of_canvas(i, self.context)
        masks, first = self._masks.get(i), 0
        for logits in self.raw(i):
            rules.apply_(logits)
            if masks is not None:
                masks.exclude_(logits, first)
            yield logits
            first += len(logits)

    def read(self, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        """Reads rows tile by tile. Canvases whose rules or masks need whole rows are read
        separately, some whole rows at a time."""
        whole = sorted({*self.filters.needs_whole_rows(self.batch), *self._masks})
        if not whole:
            return self._read_by_tiles(self.hidden, row_temperature, draw, self._guess_rows())
        is_plain = np.ones(len(draw), dtype=bool)
        parts, places = [], []
        for i in whole:
            rows = self.batch.rows_of(i)
            is_plain[rows] = False
            places.append(np.arange(rows.start, rows.stop))
            parts.append(self._read_canvas(i, row_temperature, draw))
        if is_plain.any():
            places.append(np.flatnonzero(is_plain))
            plain = async_tensor_h2d(places[-1], device=draw.device)
            guess = self._guess_rows()
            parts.append(
                self._read_by_tiles(
                    self.hidden[plain],
                    row_temperature[plain],
                    draw[plain],
                    None if guess is None else guess[plain],
                )
            )
        stats, soft = concat_rows(parts)
        order = async_tensor_h2d(np.concatenate(places).argsort(), device=draw.device)
        return RowStats(*(column[order] for column in stats)), soft[order]

    def _read_canvas(self, i: int, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        """Returns statistics and expected embeddings of canvas i, computed from whole rows."""
        parts, first = [], self.batch.rows_of(i).start
        for logits in self.processed(i):
            rows = slice(first, first + len(logits))
            scaled = logits.div_(row_temperature[rows])
            scaled = self.filters.truncate(scaled, self.batch, rows)
            parts.append(read_rows(self.soft, scaled, draw[rows]))
            first = rows.stop
        return concat_rows(parts)

    def _guess_rows(self) -> torch.Tensor | None:
        """Returns the last step's best guesses, [rows] int64; None if no tolerance needs them."""
        return self.batch.flatten(self.context.guesses) if self.soft.tolerance else None

    def _read_by_tiles(
        self,
        hidden: torch.Tensor,  # [rows, H]
        temperature: torch.Tensor,  # [rows, 1] fp32
        draw: torch.Tensor,  # [rows] float64
        guess: torch.Tensor | None,  # see `_guess_rows`
    ) -> ReadRows:
        """Returns statistics and expected embeddings of rows, computed tile by tile."""
        _, weight = self.model.vocabulary_shard()
        in_place = hidden.is_cuda and weight.dtype == hidden.dtype and self.soft.top_k is None
        fused_bytes = _FUSED_COPIES * hidden.element_size() if in_place else None
        on_cpu = hidden.device.type == "cpu"
        tile_rows, tile_tokens = tile_shape(
            len(draw), self.memory.budget_bytes, fused_bytes, on_cpu
        )
        num_logits = min(len(draw), tile_rows) * min(tile_tokens, len(weight))
        self.memory.record(num_logits * _streamed_bytes(fused_bytes, on_cpu))
        head, parts = self.model.lm_head_shard(), []
        for rows in tiles(slice(0, len(draw)), tile_rows):
            own, scale = hidden[rows], temperature[rows]
            soft = self.soft.start_rows(own, scale, None if guess is None else guess[rows])
            reader = self._reader(own, scale, draw[rows])
            for first in range(0, len(weight), tile_tokens):
                tile = slice(first, first + tile_tokens)
                logits, blocks, weights = reader.read_tile(F.linear(own, head[tile]))
                soft.add_tile(logits, blocks, weights, weight[tile])
            blocks = VocabBlocks(*self.model.gather_shards(reader.blocks()))
            parts.append((reader.join(blocks), self.soft.finish_rows(soft)))
        return concat_rows(parts)

    def _reader(
        self, hidden: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor
    ) -> "VocabReader | FusedVocabReader":
        """Returns the reader of this rank's vocabulary for the device."""
        first_token, weight = self.model.vocabulary_shard()
        if not hidden.is_cuda:
            return VocabReader(self.model.cap_logits, temperature, draw, first_token)
        from vllm_dllm.denoise.vocab_stream_triton import FusedVocabReader  # needs Triton

        softcap = self.model.softcap
        return FusedVocabReader(softcap, temperature, draw, first_token, len(weight))
