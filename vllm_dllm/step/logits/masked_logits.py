"""The logits of masked models' canvases, and the candidates that are drawn from them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm_dllm.denoise.impossible import MASKED_LOGIT
from vllm_dllm.denoise.masked import Candidates, draw_candidates
from vllm_dllm.denoise.row_stats import argmax, sample_by_inversion
from vllm_dllm.grammar.revealed_run import ChooseCandidate, RowCandidate
from vllm_dllm.step.logits.canvas_logits import RowMasks, WholeLogits


class MaskedLogits(WholeLogits):
    """The logits of masked models' canvases."""

    def all_rows(self, *, in_process: bool) -> torch.Tensor:
        """Returns the logits of all canvases [rows, V] fp32: with requests' rules applied if
        `in_process`, else as the model computed them. No copy is made."""
        return self._processed if in_process else self._raw

    def exclude_tokens(self, canvases: Sequence[int], tokens: torch.Tensor) -> None:
        """Excludes `tokens` [m] int64 from the canvases with indices `canvases`, in all later
        reads."""
        if canvases and self._processed is self._raw:
            self._processed = self._raw.clone()
        for i in canvases:
            self._processed[self.batch.rows_of(i)].index_fill_(1, tokens, MASKED_LOGIT)


class RowDraws(NamedTuple):
    """The logits of a step's rows, and the temperatures and noise by which tokens are drawn from
    them."""

    logits: MaskedLogits
    row_temperature: torch.Tensor  # [rows, 1] fp32
    uniform: torch.Tensor | None  # [rows] float64; None: all are greedy
    is_greedy: torch.Tensor  # [rows] bool
    judges_unscaled: bool = False  # take probabilities before temperature and truncation

    def _scale(self, logits: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        """Returns the logits of `rows` divided by their temperatures and truncated."""
        scaled = logits / self.row_temperature[rows]
        return self.logits.filters.truncate(scaled, self.logits.batch, rows)

    def draw_all(self) -> Candidates:
        """Draws a candidate from every row, tile by tile. Returns fields [rows]."""
        processed, parts = self.logits.all_rows(in_process=True), []
        for rows in self.logits.record_and_tile():
            scaled, uniform, judged = processed[rows], None, None
            if self.uniform is not None:
                judged = scaled if self.judges_unscaled else None
                scaled, uniform = self._scale(scaled, rows), self.uniform[rows]
            parts.append(draw_candidates(scaled, uniform, self.is_greedy[rows], judged))
        if len(parts) == 1:
            return parts[0]
        return Candidates(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def draw_all_without(self, excluded: torch.Tensor) -> torch.Tensor:
        """Returns [rows] int64: a token drawn from every row, none of them in `excluded` [m]
        int64."""
        num_rows = len(self.is_greedy)
        rows = torch.arange(num_rows, device=excluded.device)
        return self.draw_rows_without(rows, excluded.expand(num_rows, -1), self.uniform)

    def draw_rows_without(
        self,
        rows: torch.Tensor,  # [k] int64
        excluded: torch.Tensor,  # [k, m] int64, tokens that each of them may not have
        uniform: torch.Tensor | None,  # [k] float64; not read if all rows are greedy
    ) -> torch.Tensor:
        """Returns [k] int64: a token drawn from each of `rows`, outside those that the row
        excludes."""
        processed, parts = self.logits.all_rows(in_process=True), []
        for places in torch.arange(len(rows), device=rows.device).split(self.logits.tile_rows):
            own = rows[places]
            logits = processed[own].scatter_(1, excluded[places], MASKED_LOGIT)
            tokens = argmax(logits)
            if self.uniform is not None and uniform is not None:
                probs = self._scale(logits, own).softmax(dim=-1)
                drawn = sample_by_inversion(probs, uniform[places])
                tokens = torch.where(self.is_greedy[own], tokens, drawn)
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
        judged = logits if self.judges_unscaled else self._scale(logits, rows)
        if words is not None:
            masks = RowMasks(np.zeros(1, dtype=np.int64), words[None])
            masks.exclude_(logits := logits.clone(), 0)
        uniform = None if self.uniform is None else self.uniform[rows]
        drawn = draw_candidates(self._scale(logits, rows), uniform, self.is_greedy[rows], judged)
        # Tokens are below 2 ** 53.
        token, probability, entropy = torch.stack([column[0].double() for column in drawn]).tolist()
        return RowCandidate(int(token), probability, entropy)
