"""The logits of masked models' canvases, and the candidates that are drawn from them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.denoise.impossible import MASKED_LOGIT
from vllm_dllm.denoise.masked import Candidates, draw_candidates
from vllm_dllm.denoise.row_stats import argmax, sample_by_inversion
from vllm_dllm.grammar.canvas import ChooseCandidate, RowCandidate
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits import canvas_logits


class MaskedLogits(canvas_logits.WholeLogits):
    """The logits of masked models' canvases."""

    def all_rows(self, *, in_process: bool) -> torch.Tensor:
        """Returns the logits of all canvases [rows, V] fp32: with requests' rules applied if
        `in_process`, else as the model computed them. No copy is made."""
        return self._processed if in_process else self._raw

    def exclude_tokens(self, canvases: Sequence[int], tokens: torch.Tensor) -> None:
        """Excludes `tokens` [m] int64 from `canvases`, by index, in all later reads."""
        if canvases and self._processed is self._raw:
            self._processed = self._raw.clone()
        for i in canvases:
            self._processed[self.batch.rows_of(i)].index_fill_(1, tokens, MASKED_LOGIT)


class RowNoise(NamedTuple):
    """The temperatures and the noise by which tokens are drawn from the rows of a step."""

    batch: CanvasBatch
    tools: canvas_logits.LogitTools
    temperature: torch.Tensor  # [rows, 1] fp32
    uniform: torch.Tensor | None  # [rows] float64; None: all are greedy
    is_greedy: torch.Tensor  # [rows] bool

    def scale(self, logits: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        """Returns the logits of `rows` divided by their temperatures and truncated."""
        scaled = logits / self.temperature[rows]
        return self.tools.filters.truncate(scaled, self.batch, rows)

    def draw(
        self, logits: torch.Tensor, rows: slice, judged: torch.Tensor | None = None
    ) -> Candidates:
        """Draws a candidate from each of `rows`, whose logits are [k, V] fp32, with rules applied.
        `judged`: see `draw_candidates`."""
        if self.uniform is None:
            return draw_candidates(logits, None, self.is_greedy[rows], judged)
        scaled, uniform = self.scale(logits, rows), self.uniform[rows]
        return draw_candidates(scaled, uniform, self.is_greedy[rows], judged)

    def draw_tokens(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Returns the tokens [k] int64 that `draw` draws, tile by tile."""
        length = canvas_logits.rows_within_budget(logits.shape[1], self.tools.memory.budget_bytes)
        parts = zip(canvas_logits.tiles(rows, length), logits.split(length), strict=True)
        return torch.cat([self.draw(of_tile, tile).tokens for tile, of_tile in parts])


class RowDraws(NamedTuple):
    """The logits of a step's rows, and what tokens are drawn from them by."""

    logits: MaskedLogits
    noise: RowNoise
    judges_unscaled: bool = False  # take probabilities before temperature and truncation

    def draw_all(self) -> Candidates:
        """Draws a candidate from every row, tile by tile. Returns fields [rows]."""
        processed, parts = self.logits.all_rows(in_process=True), []
        for rows in self.logits.record_and_tile():
            judged = processed[rows] if self.judges_unscaled else None
            parts.append(self.noise.draw(processed[rows], rows, judged))
        if len(parts) == 1:
            return parts[0]
        return Candidates(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def draw_all_without(self, excluded: torch.Tensor) -> torch.Tensor:
        """Returns [rows] int64: a token drawn from every row, none of `excluded` [m] int64."""
        num_rows = len(self.noise.is_greedy)
        rows = torch.arange(num_rows, device=excluded.device)
        return self.draw_rows_without(rows, excluded.expand(num_rows, -1), self.noise.uniform)

    def draw_rows_without(
        self,
        rows: torch.Tensor,  # [k] int64
        excluded: torch.Tensor,  # [k, m] int64, tokens that each of them may not have
        uniform: torch.Tensor | None,  # [k] float64; not read if all rows are greedy
    ) -> torch.Tensor:
        """Returns [k] int64: a token drawn from each of `rows`, none that the row excludes."""
        processed, parts = self.logits.all_rows(in_process=True), []
        for places in torch.arange(len(rows), device=rows.device).split(self.logits.tile_rows):
            own = rows[places]
            logits = processed[own].scatter_(1, excluded[places], MASKED_LOGIT)
            tokens = argmax(logits)
            if self.noise.uniform is not None and uniform is not None:
                probs = self.noise.scale(logits, own).softmax(dim=-1)
                drawn = sample_by_inversion(probs, uniform[places])
                tokens = torch.where(self.noise.is_greedy[own], tokens, drawn)
            parts.append(tokens)
        return torch.cat(parts)

    def legal_in_canvas(self, i: int) -> ChooseCandidate:
        """Returns a function that takes a row of canvas i and a set of tokens, and draws one of
        them with its probability and the row's entropy. Each of its calls waits for the device."""
        return partial(self._draw_legal, self.logits.batch.rows_of(i).start)

    def _draw_legal(
        self,
        first: int,
        row: int,
        words: np.ndarray | None,  # [W] uint32, the tokens to choose from; None: all
    ) -> RowCandidate:
        """Draws a token of the set `words` from row `first + row`. Returns it with its probability
        among all tokens and the row's entropy in nats. Waits for the device."""
        rows = slice(first + row, first + row + 1)
        logits = self.logits.all_rows(in_process=True)[rows]
        judged = logits if self.judges_unscaled else self.noise.scale(logits, rows)
        if words is not None:
            masks = canvas_logits.RowMasks(np.zeros(1, dtype=np.int64), words[None])
            masks.exclude_(logits := logits.clone(), 0)
        drawn = self.noise.draw(logits, rows, judged)
        # Tokens are below 2 ** 53.
        token, probability, entropy = torch.stack([column[0].double() for column in drawn]).tolist()
        return RowCandidate(int(token), probability, entropy)
