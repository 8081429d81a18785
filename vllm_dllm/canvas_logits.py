"""The logits of a step's canvases: whole where the vocabulary is small, else never all at once.

With a large vocabulary the sampler gets hidden states and reads the vocabulary tile by tile, so
that what it takes does not grow with the number of requests. A request whose sampling parameters
need whole rows has them made for it alone. Which way a request goes depends on nothing but itself,
so its answer does not depend on its neighbours.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.canvas_batch import CanvasBatch
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.denoise.vocab_stream import (
    BLOCK,
    ExpectedEmbedding,
    VocabBlocks,
    join_blocks,
    read_blocks,
)
from vllm_dllm.logit_filters import LogitFilters

TILE_TOKENS = 16 * BLOCK
# fp32: logit, scaled, below its block's largest, weight, cumulative, rounded, for the product
_BYTES_PER_STREAMED_LOGIT = 7 * 4
# fp32: logit, scaled, log-probability, probability, cumulative; top_k and top_p sort in between
_BYTES_PER_WHOLE_LOGIT = 8 * 4

ReadRows = tuple[RowStats, torch.Tensor]
"""Statistics [rows] and expected embeddings [rows, H] of rows' scaled logits."""


class CanvasLogits(Protocol):
    """Of n canvases with `rows` positions in all."""

    def read(
        self,
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        draw: torch.Tensor,  # [rows] float64
    ) -> ReadRows: ...

    def raw(self, i: int) -> torch.Tensor:
        """The model's logits [L, V] of canvas i, fp32."""

    def processed(self, i: int) -> torch.Tensor:
        """What its request's rules make of them [L, V], before the temperature."""


class WholeLogits:
    """Made of logits [rows, V] fp32."""

    def __init__(
        self,
        logits: torch.Tensor,
        batch: CanvasBatch,
        starts: torch.Tensor,  # [n] int64, absolute position of each canvas' first token
        guesses: torch.Tensor,  # [n, C] int64, the step before's best guesses
        model: Any,
        filters: LogitFilters,
        budget_bytes: int,  # of what a step takes beside the logits
    ) -> None:
        self.batch, self.model, self.filters, self.budget = batch, model, filters, budget_bytes
        self._raw = self._processed = logits
        if ruled := filters.ruled(batch):
            self._processed = logits.clone()
            for i in ruled:
                filters.apply_(self.processed(i), i, batch, starts[i], guesses[i])

    def read(self, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        def truncate(scaled: torch.Tensor, rows: slice) -> torch.Tensor:
            return self.filters.truncate(scaled, self.batch, rows)

        logits = self._processed
        return _read_whole(self.model, logits, row_temperature, draw, truncate, self.budget)

    def raw(self, i: int) -> torch.Tensor:
        return self._raw[self.batch.rows_of(i)]

    def processed(self, i: int) -> torch.Tensor:
        return self._processed[self.batch.rows_of(i)]


class StreamedLogits:
    """Made of hidden states [rows, H], with the arguments of `WholeLogits`."""

    def __init__(
        self,
        hidden: torch.Tensor,
        batch: CanvasBatch,
        starts: torch.Tensor,
        guesses: torch.Tensor,
        model: Any,
        filters: LogitFilters,
        budget_bytes: int,  # of what a step takes at all
    ) -> None:
        self.hidden, self.batch, self.model, self.filters = hidden, batch, model, filters
        self.starts, self.guesses, self.budget = starts, guesses, budget_bytes

    def raw(self, i: int) -> torch.Tensor:
        return self.model.compute_logits(self.hidden[self.batch.rows_of(i)])

    def processed(self, i: int) -> torch.Tensor:
        logits = self.raw(i)
        self.filters.apply_(logits, i, self.batch, self.starts[i], self.guesses[i])
        return logits

    def read(self, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        whole = self.filters.needs_whole_rows(self.batch)
        if not whole:
            return self._stream(self.hidden, row_temperature, draw)
        is_plain = np.ones(len(draw), dtype=bool)
        parts, places = [], []
        for i in whole:
            rows = self.batch.rows_of(i)
            is_plain[rows] = False
            places.append(np.arange(rows.start, rows.stop))
            parts.append(self._read_one(i, row_temperature[rows], draw[rows]))
        if is_plain.any():
            places.append(np.flatnonzero(is_plain))
            plain = async_tensor_h2d(places[-1], device=draw.device)
            parts.append(self._stream(self.hidden[plain], row_temperature[plain], draw[plain]))
        stats, soft = _concat(parts)
        order = async_tensor_h2d(np.concatenate(places).argsort(), device=draw.device)
        return RowStats(*(column[order] for column in stats)), soft[order]

    def _read_one(self, i: int, temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        first = self.batch.rows_of(i).start

        def truncate(scaled: torch.Tensor, rows: slice) -> torch.Tensor:
            own = slice(first + rows.start, min(first + rows.stop, self.batch.rows_of(i).stop))
            return self.filters.truncate(scaled, self.batch, own)

        logits = self.processed(i)
        return _read_whole(self.model, logits, temperature, draw, truncate, self.budget)

    def _stream(
        self, hidden: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor
    ) -> ReadRows:
        tile_rows = max(1, self.budget // (TILE_TOKENS * _BYTES_PER_STREAMED_LOGIT))
        tiles = (slice(first, first + tile_rows) for first in range(0, len(draw), tile_rows))
        return _concat(
            [self._stream_tile(hidden[rows], temperature[rows], draw[rows]) for rows in tiles]
        )

    def _stream_tile(
        self, hidden: torch.Tensor, temperature: torch.Tensor, draw: torch.Tensor
    ) -> ReadRows:
        first_token, weight = self.model.vocabulary_shard()
        found: list[VocabBlocks] = []
        rows, hidden_size = hidden.shape
        soft = ExpectedEmbedding(rows, hidden_size, hidden.device)
        for first in range(0, len(weight), TILE_TOKENS):
            embeddings = weight[first : first + TILE_TOKENS]
            logits = F.linear(hidden, embeddings)
            weights = None
            if hidden.is_cuda:
                blocks = _fused_read_blocks()(
                    logits, temperature.squeeze(-1), draw, first_token + first, self.model.softcap
                )
            else:
                logits = self.model.cap(logits).div_(temperature)
                blocks, weights = read_blocks(logits, draw, first_token + first)
            soft.add(logits, blocks, weights, embeddings)
            found.append(blocks)
        blocks = VocabBlocks(*(torch.cat(column, dim=1) for column in zip(*found, strict=True)))
        blocks = VocabBlocks(*self.model.gather_shards(blocks))
        return join_blocks(blocks, draw), self.model.join_soft_embeddings(*soft.result())


@cache
def _fused_read_blocks() -> Callable[..., VocabBlocks]:
    from vllm_dllm.denoise.vocab_stream_triton import read_blocks_  # needs Triton

    return read_blocks_


def _read_whole(
    model: Any,
    logits: torch.Tensor,  # [rows, V] fp32
    row_temperature: torch.Tensor,
    draw: torch.Tensor,
    truncate: Callable[[torch.Tensor, slice], torch.Tensor],  # of scaled logits at these rows
    budget_bytes: int,
) -> ReadRows:
    tile_rows = max(1, budget_bytes // (logits.shape[-1] * _BYTES_PER_WHOLE_LOGIT))
    parts = []
    for first in range(0, len(draw), tile_rows):
        rows = slice(first, first + tile_rows)
        scaled = truncate(logits[rows] / row_temperature[rows], rows)
        stats, probs = row_stats(scaled, draw[rows])
        parts.append((stats, model.soft_embeddings(scaled, probs)))
    return _concat(parts)


def _concat(parts: Sequence[ReadRows]) -> ReadRows:
    if len(parts) == 1:
        return parts[0]
    stats = RowStats(*(torch.cat(c) for c in zip(*(stats for stats, _ in parts), strict=True)))
    return stats, torch.cat([soft for _, soft in parts])
