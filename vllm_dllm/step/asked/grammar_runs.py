"""Grammars of masked models: each step reveals a legal run of tokens in a request's canvas.

A revealed token stays, so a grammar's state moves on when tokens are revealed, not when they are
emitted. The run is found on the host, so a step with such a canvas waits for the device.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_dllm.denoise.masked import NO_BOUND, GrammarReveal, MaskedRules
from vllm_dllm.grammar.canvas import ChooseCandidate, RunRule, reveal_run
from vllm_dllm.grammar.walk import StuckError
from vllm_dllm.step.asked.answer import Answer
from vllm_dllm.step.asked.grammars import CanvasGrammars
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.masked_logits import RowDraws

if TYPE_CHECKING:
    from vllm_dllm.step.canvas_stages import StepInputs

_NONE = -1  # no token
_ONE = RunRule(min_tokens=1, threshold=1.0, entropy_bound_nats=NO_BOUND)  # reveals one token
_ALL = RunRule(min_tokens=1, threshold=-1.0, entropy_bound_nats=NO_BOUND)  # reveals all it can


class GrammarRuns(CanvasGrammars):
    """Keeps grammars of a masked model's requests by slot. Finds legal tokens that steps reveal."""

    def _write_forced_start(self, slot: int, answer: Answer) -> None:
        """Does nothing: a first canvas holds masks, and steps reveal forced tokens like others."""

    def reveal_runs(
        self,
        inputs: "StepInputs",
        skipped: torch.Tensor,  # [n] bool, canvases that are committed, or whose step is taken back
        rules: MaskedRules,  # fields [n]
        draws: RowDraws,
        part_length: int | None,  # positions of a part, see `RunRule`; None: a canvas is one part
    ) -> GrammarReveal:
        """Finds the legal run that this step reveals in each canvas with a grammar, and moves the
        grammars on by these runs. Waits for the device. A grammar without a legal path is given up,
        with an error in the log."""
        batch = inputs.batch
        n, C = batch.num_canvases, batch.canvas_length
        tokens = np.full((n, C), _NONE, dtype=np.int64)
        revealed, is_held = np.zeros((n, C), dtype=bool), np.zeros(n, dtype=bool)
        is_ruled = np.array([slot in self._answers for slot in batch.slots_list])
        bound = rules.entropy_bound
        if bound is None:
            bound = torch.full_like(rules.threshold, NO_BOUND)
        numbers = (inputs.starts, skipped, rules.least, rules.threshold, bound)
        on_host = torch.stack([column.double() for column in numbers], dim=1).tolist()
        for i, slot in enumerate(batch.slots_list):
            begin, is_skipped, least, threshold, entropy_bound = on_host[i]
            if slot not in self._answers or is_skipped:
                continue
            if (answer := self._open_answer(slot, int(begin))) is None:
                continue
            rule = RunRule(int(least), threshold, entropy_bound, part_length, int(begin) % C)
            first, length = answer.position - int(begin), int(batch.lengths_np[i])
            run = self._reveal_run(slot, draws.legal_in_canvas(i), first, length, rule)
            if run is None:
                continue
            end = first + len(run)
            is_held[i], tokens[i, first:end] = True, run
            # Nobody reads what is behind the end; who wants it gets what the model likes.
            ended = answer.state.has_ended and not answer.goes_on
            is_last = ended or answer.position == answer.end
            revealed[i, first : length if is_last else end] = True
        return GrammarReveal(*map(self._to_device, (is_ruled, is_held, revealed, tokens)))

    def _open_answer(self, slot: int, begin: int) -> Answer | None:
        """Returns what `_update_answer` does; None, too, if the answer has all its tokens."""
        answer = self._update_answer(slot, begin)
        return None if answer is None or answer.position >= answer.end else answer

    def _reveal_run(
        self, slot: int, choose: ChooseCandidate, first: int, length: int, rule: RunRule
    ) -> list[int] | None:
        """Returns the legal tokens to reveal from row `first` of `length` rows on, and moves the
        slot's answer on by them. Returns None, and gives the grammar up, if no path is legal."""
        answer = self._answers[slot]
        num_tokens = answer.end - answer.position
        try:
            run = reveal_run(
                answer.state, choose, first, length, num_tokens, rule, answer.stop_token
            )
        except StuckError as error:
            self._give_up(slot, str(error))
            return None
        answer.position += len(run.tokens)
        answer.is_cut |= run.is_cut
        return run.tokens

    def legal_drafts(
        self,
        inputs: "StepInputs",
        are_chosen: torch.Tensor,  # [n] bool, canvases whose drafts this step verifies or makes
        is_draft: torch.Tensor,  # [n] bool, those of them that hold a draft; it is verified now
        draws: RowDraws,
        tokens: torch.Tensor,  # [n, C] int64, drawn from the rows without grammars
        lead: int = 0,  # how many positions ahead a row of a verified canvas predicts: 0 or 1
    ) -> torch.Tensor:
        """Returns `tokens` [n, C] int64, with tokens that the grammar allows in the chosen canvases
        that have one. A verified draft gets them up to and including the first that differs from
        it, and the grammar moves on by them. A new draft gets a legal path as far as one is found,
        and the grammar moves on when it is verified. Rows that the answer has passed before, and
        those behind the legal tokens, keep theirs. Waits for the device."""
        batch = inputs.batch
        if not self.any_in(batch):
            return tokens
        canvas = self._slots.canvas[batch.slot_index]
        read = torch.cat((inputs.starts[:, None], is_draft.long()[:, None], canvas), dim=1)

        def find(i: int, start: int, is_verified: int, *draft: int) -> tuple[int, list[int]]:
            slot, length = batch.slots_list[i], int(batch.lengths_np[i])
            choose = draws.legal_in_canvas(i)
            if not is_verified:
                return self._find_draft(slot, start, length, choose)
            # With a lead, the last row predicts a token behind the canvas: it has no draft.
            drafted = [*draft, _NONE][lead : lead + length]
            return self._verify_draft(slot, start + lead, drafted, choose, lead > 0)

        return self._replace_tokens(batch, read, are_chosen, tokens, find)

    def _verify_draft(
        self,
        slot: int,
        begin: int,  # absolute position that the canvas' first row predicts
        drafted: list[int],  # the draft's token for each row
        choose: ChooseCandidate,
        emits: bool,
    ) -> tuple[int, list[int]]:
        """Chooses the legal token of one row after the other, until one differs from the draft, the
        answer ends or its grammar is given up. Moves the slot's answer on by these tokens. Returns
        the first row that the answer had not passed before, and the tokens from there on.

        `emits`: whether this step emits the tokens up to the difference. The next canvas begins
        there, and so does the canvas of a request that comes back after a preemption.
        """
        if (answer := self._open_answer(slot, begin)) is None:
            return 0, []
        first = answer.position - begin
        chosen: list[int] = []
        for row, draft in enumerate(drafted[first:], first):
            if answer.state.has_ended or answer.position >= answer.end:
                break
            if emits:
                answer.canvas = answer.current_mark
            run = self._reveal_run(slot, choose, row, row + 1, _ONE)
            chosen += run or ()
            if run != [draft]:
                break
        return first, chosen

    def _find_draft(
        self, slot: int, begin: int, length: int, choose: ChooseCandidate
    ) -> tuple[int, list[int]]:
        """Returns the first row of the slot's canvas that its answer has not passed, and legal
        tokens from there on; none if the answer has all its tokens, or no legal path is found. The
        canvas begins at absolute position `begin` and has `length` rows."""
        if (answer := self._open_answer(slot, begin)) is None:
            return 0, []
        first, num_tokens = answer.position - begin, answer.end - answer.position
        state = answer.state.copy()
        try:
            run = reveal_run(state, choose, first, length, num_tokens, _ALL, answer.stop_token)
        except StuckError:  # the step that verifies the draft gives the grammar up
            return 0, []
        return first, run.tokens

    def legal_first_tokens(
        self,
        rows: CanvasBatch,  # one of each request
        starts: torch.Tensor,  # [n] int64, where their canvases begin
        is_new: torch.Tensor | None,  # [n] bool, canvases that begin now; None: all
        draws: RowDraws,
        tokens: torch.Tensor,  # [n] int64, drawn without grammars
    ) -> torch.Tensor:
        """Returns `tokens` [n] int64 with legal tokens where a canvas begins now and its request
        has a grammar. Waits for the device, and for grammars that are still being compiled."""
        if not self.any_in(rows):
            return tokens

        def choose_first(i: int, start: int) -> tuple[int, list[int]]:
            slot = rows.slots_list[i]
            self._added.pop(slot, None)
            if self._open_answer(slot, start) is None:
                return 0, []
            return 0, self._reveal_run(slot, draws.legal_in_canvas(i), 0, 1, _ONE) or []

        begins = torch.ones_like(starts) if is_new is None else is_new
        replaced = self._replace_tokens(
            rows, starts[:, None], begins, tokens[:, None], choose_first
        )
        return replaced[:, 0]

    def _replace_tokens(
        self,
        batch: CanvasBatch,
        read: torch.Tensor,  # [n, k] int64, what `find` reads of each canvas
        are_chosen: torch.Tensor,  # [n] bool, canvases whose tokens may be replaced
        tokens: torch.Tensor,  # [n, C] int64
        find: Callable[..., tuple[int, list[int]]],
    ) -> torch.Tensor:
        """Returns `tokens` [n, C] int64, with legal ones in the chosen canvases that have a
        grammar. `find` gets the index of such a canvas and its row of `read`, and returns the first
        row whose token is replaced and the tokens from there on. Waits for the device."""
        legal = np.full(tokens.shape, _NONE, dtype=np.int64)
        on_host = torch.cat((are_chosen.long()[:, None], read), dim=1).tolist()  # all in one copy
        for i, (is_chosen, *of_canvas) in enumerate(on_host):
            if is_chosen and batch.slots_list[i] in self._answers:
                first, run = find(i, *of_canvas)
                legal[i, first : first + len(run)] = run
        on_device = self._to_device(legal)
        return torch.where(on_device == _NONE, tokens, on_device)
