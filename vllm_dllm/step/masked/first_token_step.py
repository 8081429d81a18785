"""Steps of canvases whose first token is sampled before their first step.

The logits of a prompt's last row, and of a finished block's last row when it is prefilled, are the
next token's. So a block's first step cannot share the forward that prefills the block before it:
each block but the last takes one forward more than it has steps.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.requests.ends import is_last_block
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Drafts, StepInputs, StepResult, VerifiedDrafts
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.masked_logits import MaskedLogits, RowDraws, RowNoise
from vllm_dllm.step.masked.masked_step import Choice, MaskedStep


class FirstTokenStep(MaskedStep):
    """Samples the first token of each canvas before its first step, from the row before it."""

    _ended: CanvasBatch | None = None  # the last rows of prefills that end in this step
    # The last rows of k canvases, any of which this step may commit, with asynchronous scheduling.
    _last: CanvasBatch | None = None
    _last_canvases: torch.Tensor | None = None  # [k] int64, indices of these canvases; None: all

    def begin_step(self, input_batch: InputBatch) -> None:
        """Appends the rows that predict canvases' first tokens to `input_batch.logits_indices`,
        behind the canvases' own rows. These are the last rows of prefills that end, and of canvases
        that this step may commit."""
        super().begin_step(input_batch)
        # Exact in a prefill.
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[: input_batch.num_reqs]
        has_ended = input_batch.is_prefilling_np & (ends == input_batch.prefill_len_np)
        if not self.family.is_causal:  # else the canvas' first tokens are the prompt's last
            has_ended &= ends % self.canvas_length == 0
        self._ended = self._append_last_rows(input_batch, has_ended)
        self._last = None
        if self.batch is not None and not self.requests.joins_commits:
            has_canvas, are_predicting = (
                np.zeros_like(has_ended),
                self._predicts_first_token(self.batch),
            )
            has_canvas[self.batch.requests_np] = are_predicting
            self._last = self._append_last_rows(input_batch, has_canvas)
            self._last_canvases = None
            if not are_predicting.all():
                places = np.flatnonzero(are_predicting)
                self._last_canvases = async_tensor_h2d(places, device=self.device)

    def _predicts_first_token(self, batch: CanvasBatch) -> np.ndarray:
        """Returns [n] bool: canvases whose commit predicts the next canvas' first token."""
        return np.ones(batch.num_canvases, dtype=bool)

    def _append_last_rows(
        self,
        input_batch: InputBatch,
        chosen: np.ndarray,  # [num_reqs] bool
    ) -> CanvasBatch | None:
        """Appends the last row of each chosen request to `input_batch.logits_indices`, so that the
        runner computes its logits. Returns a batch of these rows; None if there are none."""
        if not chosen.any():
            return None
        last = CanvasBatch.from_last_rows(
            input_batch, chosen.astype(np.int64), self.canvas_length, self.device
        )
        rows = last.first_rows if last.tokens is None else last.tokens
        input_batch.logits_indices = torch.cat((input_batch.logits_indices, rows))
        return last

    def start_canvases(
        self, batch: CanvasBatch | None, source: torch.Tensor, input_batch: InputBatch
    ) -> None:
        """Writes the first tokens of canvases whose prefill ends in this step into their slots."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        first_row = 0 if batch is None else batch.num_rows
        logits = source[first_row : first_row + ended.num_canvases]
        starts, idx = input_batch.seq_lens[ended.request_index], ended.slot_index
        self.slots.canvas[idx, 0] = self._sample_first_tokens(ended, logits, starts, None)
        self.slots.revealed[idx, 0] = True

    def _denoise_and_settle(
        self, inputs: StepInputs, source: torch.Tensor, input_batch: InputBatch
    ) -> StepResult:
        """Denoises and settles the canvases, whose rows come first in `source`. Then samples the
        first token of each canvas that follows a block committed by this step."""
        result = super()._denoise_and_settle(inputs, source[: inputs.batch.num_rows], input_batch)
        last, self._last = self._last, None
        if last is not None:
            self._start_next_canvases(inputs, result, last, source[-last.num_canvases :])
        return result

    def _start_next_canvases(
        self,
        inputs: StepInputs,
        result: StepResult,
        last: CanvasBatch,
        logits: torch.Tensor,  # [k, V] fp32, of the rows `last`
    ) -> None:
        """Writes the first token of each canvas that follows a block committed by this step. The
        commit is also the block's prefill, so its last row predicts that token."""
        slots, idx = self.slots, last.slot_index
        is_new, ends = result.emitted > 0, inputs.block_ends
        if self._last_canvases is not None:
            is_new, ends = is_new[self._last_canvases], ends[self._last_canvases]
        filters = self.requests.filters
        filters.write_emitted_tokens(inputs, result.best_guess, result.emitted)
        first_tokens = self._sample_first_tokens(last, logits, ends, is_new)
        slots.canvas[idx, 0] = torch.where(is_new, first_tokens, slots.canvas[idx, 0])
        slots.revealed[idx, 0] = slots.revealed[idx, 0] | is_new

    def _sample_first_tokens(
        self,
        rows: CanvasBatch,  # of n requests, the row before each one's canvas
        logits: torch.Tensor,  # [n, V] fp32
        starts: torch.Tensor,  # [n] int64, where their canvases begin
        is_new: torch.Tensor | None,  # [n] bool, canvases that do begin; None: all
    ) -> torch.Tensor:
        """Returns [n] int64: the first token of each canvas, sampled from the row before it; always
        the most probable one in shifted families (`Family.is_shifted`). For requests that ask for
        log-probabilities, keeps the tokens' scores and logits where `is_new`. Waits for the device
        if a request has a grammar."""
        slots, settings = self.slots, self.slot_settings.for_batch(rows)
        guesses = slots.canvas.new_full((rows.num_canvases, 1), NO_TOKEN)
        ruled = MaskedLogits(logits, RuleContext(rows, starts, guesses), self.logit_tools)
        key = slots.read_numbers(rows.slot_index).noise_key
        draw = noise.uniform(key, starts[:, None], torch.zeros_like(key), noise.INITIAL)
        is_greedy = settings.is_greedy | self.family.is_shifted
        temperature = settings.temperature[:, None]
        draws = RowDraws(
            ruled, RowNoise(rows, self.logit_tools, temperature, draw[:, 0], is_greedy)
        )
        tokens = draws.draw_all().tokens
        tokens = self.grammars.legal_first_tokens(rows, starts, is_new, draws, tokens)
        self.requests.logprobs.keep_first_scores(rows, ruled, temperature, tokens, is_new)
        self._keep_first_logits(rows, ruled, is_new)
        return tokens

    def _keep_first_logits(
        self,
        rows: CanvasBatch,
        logits: MaskedLogits,  # of n rows
        is_new: torch.Tensor | None,  # [n] bool; None: all are
    ) -> None:
        """Hook: keeps the logits of first tokens where `is_new`, for subclasses whose later steps
        cannot compute them again. Does nothing here: each first token has a row of its own."""


class VerifiedStep(FirstTokenStep):
    """Makes and verifies drafts, of models whose known tokens see no canvas and whose canvases are
    whole blocks. Canvases that are no drafts are denoised as in `FirstTokenStep`.

    A canvas that is a draft begins with a known token, and has two steps. The first, a diffusion
    step, reveals all other tokens. The second reads the canvas again, causally, like a commit, so
    each row has the next token's probabilities. A token is drawn from each row, and the draft is
    accepted up to the first token that differs from what was drawn. The next canvas begins behind
    it, with the token drawn there. So each token of an answer is drawn from the autoregressive
    model's distribution, whatever was drafted (`linear_spec_generate` of Nemotron-Labs-Diffusion's
    modeling_nemotron_labs_diffusion.py). The keys and values of accepted tokens are a prefill's.

    Noise is a function of the seed and the position (`denoise.noise`). Both steps draw a position
    by the same number, so they often agree, and a seed's answer does not depend on what was
    drafted. Rejection sampling would have to keep the draft's probabilities: a row of the
    vocabulary for each of its tokens.

    A canvas of one row has nothing to draft, and is verified in every step: that is decoding token
    by token.
    """

    num_recomputed = CanvasStep.num_recomputed
    _cut_canvases = CanvasStep._cut_canvases

    def _predicts_first_token(self, batch: CanvasBatch) -> np.ndarray:
        """Returns [n] bool: canvases that are no drafts. A draft's next token is drawn when the
        draft is verified."""
        return ~self.slot_settings.are_verified(batch.slots_np)

    def _read_slots(self, batch: CanvasBatch, input_batch: InputBatch) -> StepInputs:
        """Reads the slots as `FirstTokenStep` does, and sets `drafts`: which canvases are drafts,
        and which of these this step verifies. It stays None if no request has its drafts
        verified."""
        inputs = super()._read_slots(batch, input_batch)
        is_draft = self._settings_of(inputs).is_verified
        if is_draft is None:
            return inputs
        drafts = Drafts(
            is_draft_np=self.slot_settings.are_verified(batch.slots_np),
            is_draft=is_draft,
            verified_now=is_draft & inputs.commits,  # a draft's second step is its commit
        )
        return inputs._replace(drafts=drafts)

    def _noise(self, inputs: StepInputs) -> torch.Tensor:
        """Returns the noise. It is the same for a position in both steps of a draft: a row that is
        verified predicts the position after its own."""
        if inputs.drafts is None:
            return super()._noise(inputs)
        is_draft, numbers = inputs.drafts.is_draft, inputs.numbers
        return noise.uniform(
            numbers.noise_key,
            self._positions(inputs) + inputs.drafts.verified_now[:, None],
            numbers.steps_done.masked_fill(is_draft, 0),
            torch.where(is_draft, noise.INITIAL, noise.CANDIDATE),
        )

    def _leads(self, inputs: StepInputs) -> dict[int, torch.Tensor]:
        """Returns 1 for drafts that this step verifies and 0 for drafts that it makes, by index of
        the canvas. Only canvases whose requests have rules have an entry."""
        drafts = inputs.drafts
        if drafts is None:
            return {}
        ruled = self.requests.filters.canvases_with_rules(inputs.batch)
        return {i: drafts.verified_now[i].long() for i in ruled if drafts.is_draft_np[i]}

    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Denoises the canvases. Log-probabilities of drafts are those before the temperature, as
        for an autoregressive model."""
        denoised, logprobs = super()._denoise(inputs, source), self.requests.logprobs
        if inputs.drafts is None or logprobs.reports_processed or not logprobs.any_in(inputs.batch):
            return denoised
        is_draft = inputs.batch.expand_to_rows(inputs.drafts.is_draft)[:, None]
        row_temperature = denoised.row_temperature.masked_fill(is_draft, 1.0)
        return denoised._replace(row_temperature=row_temperature)

    def _verify_drafts(self, inputs: StepInputs, choice: Choice) -> VerifiedDrafts | None:
        """Accepts the tokens of the drafts that are verified, up to the first that differs from the
        candidate of the row before it. Returns None if no canvas is a draft."""
        drafts, draws = inputs.drafts, choice.draws
        if drafts is None:
            return None
        batch, ends, C = inputs.batch, inputs.numbers.end, self.canvas_length
        canvas = self.slots.canvas[batch.slot_index]
        counts = drafts.verified_now if inputs.cut is None else drafts.verified_now & ~inputs.cut
        tokens = self.grammars.legal_drafts(
            inputs, counts, counts, draws, choice.candidates.tokens, lead=1
        )
        matches = tokens[:, :-1] == canvas[:, 1:]
        if batch.valid is not None:
            matches &= batch.valid[:, 1:]
        num_accepted = 1 + matches.long().cumprod(dim=-1).sum(dim=-1)  # 1..C
        next_token = tokens.gather(1, num_accepted[:, None] - 1)
        self.requests.logprobs.shift_draft_logits(batch, draws.logits, num_accepted, counts)

        # What ends the answer needs no forward of its own.
        behind = inputs.starts + num_accepted
        is_over = is_last_block(next_token, None, behind + 1, ends, inputs.stops)
        is_next = torch.arange(C, device=self.device) == num_accepted[:, None]
        emitted = num_accepted + (is_over & (behind < ends) & (num_accepted < C))
        begins_over = is_last_block(canvas[:, :1], None, inputs.starts + 1, ends, inputs.stops)
        return VerifiedDrafts(
            tokens=torch.where(is_next, next_token, canvas),
            emitted=torch.where(drafts.verified_now, emitted, begins_over),
            next_token=next_token[:, 0],
        )

    def _keep_first_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of drafts' first tokens, for log-probabilities: the rows of a verified
        draft predict the tokens behind them."""
        logprobs = self.requests.logprobs
        are_drafts = self.slot_settings.are_verified(rows.slots_np)
        kept = logits.all_rows(in_process=logprobs.reports_processed)
        for i in np.flatnonzero(are_drafts).tolist():
            own = None if is_new is None else is_new[i : i + 1]
            logprobs.keep_first_logits([int(rows.slots_np[i])], kept[i : i + 1], own)
