"""The logits of a step's canvases, held whole; `streamed_logits` reads large vocabularies by
tiles."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.step.logits.filters import LogitFilters, RuleContext
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding

# fp32: logit, scaled, log-probability, probability, cumulative; top_k and top_p sort in between
BYTES_PER_WHOLE_LOGIT = 8 * 4


def most_step_bytes(model: Any, dtype: torch.dtype, rows: int, budget_bytes: int) -> int:
    """Returns the most bytes that a step of `rows` rows takes for logits and the values computed
    from them. `dtype`: the model's."""
    if model.streams_vocabulary:
        return budget_bytes
    # The LM head's output, its soft-capped copy, and one to which rules are applied.
    per_logit = dtype.itemsize + 8
    return budget_bytes + rows * model.config.vocab_size * per_logit


def rows_within_budget(vocab_size: int, budget_bytes: int) -> int:
    """Returns how many rows of logits, with what is made of them, fit the budget; 1 or more."""
    return max(1, budget_bytes // (vocab_size * BYTES_PER_WHOLE_LOGIT))


class SamplingMemory:
    """Records the most memory that a step's logits, and what is made of them, have taken. It is
    counted on the host, from shapes: no allocator is asked, so it is the same on every device, and
    nothing waits."""

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: the most that a tile of logits may take, beside logits held whole."""
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0

    def record(self, num_bytes: int) -> None:
        """Records that `num_bytes` are held at once."""
        self.peak_bytes = max(self.peak_bytes, num_bytes)


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


class LogitTools(NamedTuple):
    """What the logits of all steps share."""

    soft: SoftEmbedding
    filters: LogitFilters
    memory: SamplingMemory


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
        """Returns the logits [V] fp32 of a position of canvas i, by rules for a single row."""

    def exclude(self, i: int, masks: RowMasks) -> None:
        """Excludes the tokens that `masks` does not allow from canvas i, in all later reads."""


class WholeLogits:
    """`CanvasLogits` made of logits [rows, V] fp32. Requests' rules are applied once, to a copy."""

    def __init__(self, logits: torch.Tensor, context: RuleContext, tools: LogitTools) -> None:
        self.batch = context.batch
        self.soft, self.filters, self.memory = tools
        self.tile_rows = rows_within_budget(logits.shape[1], self.memory.budget_bytes)
        self._raw = self._processed = logits
        if ruled := self.filters.canvases_with_rules(self.batch):
            self._processed = logits.clone()
            for i in ruled:
                rules = self.filters.rules_of_canvas(i, context)
                rules.apply_(self._processed[self.batch.rows_of(i)])

    def exclude(self, i: int, masks: RowMasks) -> None:
        if self._processed is self._raw:
            self._processed = self._raw.clone()
        masks.exclude_(self._processed[self.batch.rows_of(i)], 0)

    def row(self, i: int, position: int) -> torch.Tensor:
        return self._processed[self.batch.rows_of(i)][position]

    def record_and_tile(self) -> Iterator[slice]:
        """Returns slices that split all rows into tiles, and records the memory of one tile."""
        num_rows = len(self._raw)
        self._record_memory(min(num_rows, self.tile_rows))
        return tiles(slice(0, num_rows), self.tile_rows)

    def _record_memory(self, num_rows: int) -> None:
        """Records the memory of logits, and of what is made of `num_rows` rows at a time."""
        held = 1 if self._processed is self._raw else 2
        self.memory.record(
            held * self._raw.nbytes + num_rows * self._raw.shape[1] * BYTES_PER_WHOLE_LOGIT
        )

    def read(self, row_temperature: torch.Tensor, draw: torch.Tensor) -> ReadRows:
        parts = []
        for rows in self.record_and_tile():
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
