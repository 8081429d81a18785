"""The logits of a step's canvases, held whole; `streamed_logits` reads large vocabularies by
tiles."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT, MASKED_LOGIT
from vllm_dllm.denoise.masked import Candidates, draw_candidates
from vllm_dllm.denoise.row_stats import RowStats, argmax, row_stats, sample_by_inversion
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.filters import LogitFilters
from vllm_dllm.step.logits.sampling_memory import (
    BYTES_PER_WHOLE_LOGIT,
    SamplingMemory,
    rows_within_budget,
)
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding


class RowMasks(NamedTuple):
    """The legal tokens of some rows of a canvas, see `vllm_dllm.grammar`. They stay on the host,
    because with a large vocabulary they take megabytes, and only some rows are needed at a time."""

    rows: np.ndarray  # [m] int64, rising, rows of the canvas
    words: np.ndarray  # [m, W] uint32, a bit for each token

    def exclude_(
        self,
        logits: torch.Tensor,  # [l, V] fp32, changed in place
        first: int,  # row of the canvas
    ) -> None:
        """Excludes the tokens that are not legal from rows `first` to `first + l` of the canvas.
        Rows without an entry stay."""
        begin, end = np.searchsorted(self.rows, (first, first + len(logits)))
        if begin == end:
            return
        rows = async_tensor_h2d(self.rows[begin:end] - first, device=logits.device)
        words = async_tensor_h2d(self.words[begin:end].view(np.int32), device=logits.device)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_legal = (words[:, :, None] >> bits) & 1
        is_legal = is_legal.flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill_(~is_legal, ILLEGAL_LOGIT)


ReadRows = tuple[RowStats, torch.Tensor]
"""Statistics, fields [rows], and expected embeddings [rows, H] of rows' scaled logits."""


class CanvasLogits(Protocol):
    """The logits of n canvases with `rows` positions in all."""

    def read(
        self,
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        draw: torch.Tensor,  # [rows] float64 in [0, 1), the numbers that candidates are drawn by
    ) -> ReadRows:
        """Returns statistics and expected embeddings of all rows."""

    def raw(self, i: int) -> Iterator[torch.Tensor]:
        """Yields the model's logits of canvas i as [L, V] fp32, some rows at a time, in order."""

    def processed(self, i: int) -> Iterator[torch.Tensor]:
        """Yields the logits of `raw` with the request's rules applied and without a temperature."""

    def row(self, i: int, position: int) -> torch.Tensor:
        """Returns the logits [V] fp32 of one position of canvas i, with the rules that need no
        other row."""

    def exclude(self, i: int, masks: RowMasks) -> None:
        """Excludes the tokens that `masks` does not allow from canvas i, in all later reads."""


class WholeLogits:
    """`CanvasLogits` made of logits [rows, V] fp32. Requests' rules are applied once, to a copy."""

    def __init__(
        self,
        logits: torch.Tensor,
        batch: CanvasBatch,
        starts: torch.Tensor,  # [n] int64, absolute position of each canvas' first token
        guesses: torch.Tensor,  # [n, C] int64, the step before's best guesses
        soft: SoftEmbedding,
        filters: LogitFilters,
        memory: SamplingMemory,
        kept: torch.Tensor | None = None,  # [n, C] int64, tokens revealed for good; < 0: none yet
        leads: Mapping[int, torch.Tensor] = MappingProxyType({}),  # by canvas, see `CanvasRules`
    ) -> None:
        self.batch, self.soft, self.filters = batch, soft, filters
        self.memory, self.tile_rows = (
            memory,
            rows_within_budget(logits.shape[1], memory.budget_bytes),
        )
        self._raw = self._processed = logits
        if ruled := filters.canvases_with_rules(batch):
            self._processed = logits.clone()
            for i in ruled:
                own = None if kept is None else kept[i]
                rules = filters.rules_of_canvas(i, batch, starts[i], guesses[i], own, leads.get(i))
                rules.apply_(self._processed[batch.rows_of(i)])

    def exclude(self, i: int, masks: RowMasks) -> None:
        if self._processed is self._raw:
            self._processed = self._raw.clone()
        masks.exclude_(self._processed[self.batch.rows_of(i)], 0)

    def row(self, i: int, position: int) -> torch.Tensor:
        return self._processed[self.batch.rows_of(i)][position]

    def _record_and_tile(self) -> Iterator[slice]:
        """Returns slices that split all rows into tiles, and records the memory that one tile
        takes."""
        num_rows = len(self._raw)
        self._record_memory(min(num_rows, self.tile_rows))
        return tiles(slice(0, num_rows), self.tile_rows)

    def _record_memory(self, num_rows: int) -> None:
        """Records the memory of the logits and of the values computed from `num_rows` rows at a
        time."""
        held = 1 if self._processed is self._raw else 2
        self.memory.record(
            held * self._raw.nbytes + num_rows * self._raw.shape[1] * BYTES_PER_WHOLE_LOGIT
        )

    def read(self, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        parts = []
        for rows in self._record_and_tile():
            scaled = self._processed[rows] / row_temperature[rows]
            scaled = self.filters.truncate(scaled, self.batch, rows)
            parts.append(read_rows(self.soft, scaled, draw[rows]))
        return concat_rows(parts)

    def raw(self, i: int) -> Iterator[torch.Tensor]:
        yield self._of_canvas(self._raw, i)

    def processed(self, i: int) -> Iterator[torch.Tensor]:
        yield self._of_canvas(self._processed, i)

    def _of_canvas(self, logits: torch.Tensor, i: int) -> torch.Tensor:
        """Returns canvas i's rows of `logits`, a view, and records their memory."""
        rows = logits[self.batch.rows_of(i)]
        self._record_memory(len(rows))
        return rows


class MaskedLogits(WholeLogits):
    """The logits of masked models' canvases, from which candidates are drawn."""

    def all_rows(self, *, in_process: bool) -> torch.Tensor:
        """Returns the logits of all canvases [rows, V] fp32: with requests' rules applied if
        `in_process`, else as the model computed them. No copy is made."""
        return self._processed if in_process else self._raw

    def draw(
        self,
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        uniform: torch.Tensor | None,  # [rows] float64; None: all are greedy, nothing is scaled
        is_greedy: torch.Tensor,  # [rows] bool
        *,
        judges_unscaled: bool = False,  # take probabilities before temperature and truncation
    ) -> Candidates:
        """Draws a candidate for each row, tile by tile. Returns fields [rows]."""
        parts = []
        for rows in self._record_and_tile():
            scaled, own, judged = self._processed[rows], None, None
            if uniform is not None:
                judged = scaled if judges_unscaled else None
                scaled = self.filters.truncate(scaled / row_temperature[rows], self.batch, rows)
                own = uniform[rows]
            parts.append(draw_candidates(scaled, own, is_greedy[rows], judged))
        if len(parts) == 1:
            return parts[0]
        return Candidates(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def draw_without(
        self,
        rows: torch.Tensor,  # [k] int64, of all canvases' rows
        excluded: torch.Tensor,  # [k, m] int64, tokens that each of them may not have
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        uniform: torch.Tensor | None,  # [k] float64; None: all are greedy
        is_greedy: torch.Tensor,  # [rows] bool
    ) -> torch.Tensor:
        """Returns [k] int64: a token drawn from each of `rows`, outside those that the row
        excludes."""
        parts = []
        for places in torch.arange(len(rows), device=rows.device).split(self.tile_rows):
            own = rows[places]
            logits = self._processed[own].scatter_(1, excluded[places], MASKED_LOGIT)
            tokens = argmax(logits)
            if uniform is not None:
                scaled = self.filters.truncate(logits / row_temperature[own], self.batch, own)
                drawn = sample_by_inversion(scaled.softmax(dim=-1), uniform[places])
                tokens = torch.where(is_greedy[own], tokens, drawn)
            parts.append(tokens)
        return torch.cat(parts)

    def exclude_tokens(self, canvases: Sequence[int], tokens: torch.Tensor) -> None:
        """Excludes `tokens` [m] int64 from the canvases with indices `canvases`, in all later
        reads."""
        if canvases and self._processed is self._raw:
            self._processed = self._raw.clone()
        for i in canvases:
            self._processed[self.batch.rows_of(i)].index_fill_(1, tokens, MASKED_LOGIT)

    def draw_legal(
        self,
        row: int,  # of all canvases' rows
        words: np.ndarray | None,  # [W] uint32, the tokens to choose from; None: all
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        uniform: torch.Tensor | None,  # [rows] float64; None: all are greedy
        is_greedy: torch.Tensor,  # [rows] bool
        *,
        judges_unscaled: bool,
    ) -> Candidates:
        """Draws a candidate of the set `words` from one row. Returns fields [1]. The candidate's
        probability is that among all tokens."""
        rows = slice(row, row + 1)

        def scaled(logits: torch.Tensor) -> torch.Tensor:
            return self.filters.truncate(logits / row_temperature[rows], self.batch, rows)

        free = self._processed[rows]
        judged = free if judges_unscaled else scaled(free)
        if words is not None:
            masks = RowMasks(np.zeros(1, dtype=np.int64), words[None])
            masks.exclude_(free := free.clone(), 0)
        draw = None if uniform is None else uniform[rows]
        return draw_candidates(scaled(free), draw, is_greedy[rows], judged)


def tiles(rows: slice, length: int) -> Iterator[slice]:
    """Yields consecutive slices of at most `length` rows, which together are `rows`."""
    for first in range(rows.start, rows.stop, length):
        yield slice(first, min(first + length, rows.stop))


def read_rows(soft: SoftEmbedding, scaled: torch.Tensor, draw: torch.Tensor) -> ReadRows:
    """Returns statistics and expected embeddings of scaled logits [rows, V] fp32. Candidates are
    drawn by the numbers `draw` [rows] float64."""
    stats, probs = row_stats(scaled, draw)
    return stats, soft.embed_rows(scaled, probs)


def concat_rows(parts: Sequence[ReadRows]) -> ReadRows:
    """Returns what was read of consecutive rows as one."""
    if len(parts) == 1:
        return parts[0]
    stats = RowStats(*(torch.cat(c) for c in zip(*(stats for stats, _ in parts), strict=True)))
    return stats, torch.cat([soft for _, soft in parts])
