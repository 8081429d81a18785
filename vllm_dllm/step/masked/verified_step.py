"""Drafts: the same weights, run causally, verify what a diffusion step drafted.

A canvas that is a draft begins with a known token, and has two steps. The first, a diffusion step,
reveals all other tokens. The second reads the canvas again, causally, like a commit, so each row
has the next token's probabilities. A token is drawn from each row, and the draft is accepted up to
the first token that differs from what was drawn. The next canvas begins behind it, with the token
drawn there. So each token of an answer is drawn from the autoregressive model's distribution,
whatever was drafted (`linear_spec_generate` of Nemotron-Labs-Diffusion's
modeling_nemotron_labs_diffusion.py). The keys and values of accepted tokens are a prefill's.

Noise is a function of the seed and the position (`denoise.noise`). Both steps draw a position by
the same number, so they often agree, and a seed's answer does not depend on what was drafted.
Rejection sampling would have to keep the draft's probabilities: a row of the vocabulary for each of
its tokens.

A canvas of one row has nothing to draft, and is verified in every step: that is decoding token by
token.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise import noise
from vllm_dllm.requests.ends import is_last_block
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Drafts, StepInputs, VerifiedDrafts
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.masked_logits import MaskedLogits
from vllm_dllm.step.masked.masked_step import Choice
from vllm_dllm.step.masked.seeded_step import SeededStep


class VerifiedStep(SeededStep):
    """Makes and verifies drafts, of models whose known tokens see no canvas and whose canvases are
    whole blocks. Canvases that are no drafts are denoised as in `SeededStep`."""

    num_recomputed = CanvasStep.num_recomputed
    _cut_canvases = CanvasStep._cut_canvases

    def _predicts_next_seed(self, batch: CanvasBatch) -> np.ndarray:
        """Returns [n] bool: canvases that are no drafts. A draft's next token is drawn when the
        draft is verified."""
        return ~self.slot_settings.are_verified(batch.slots_np)

    def _read_slots(self, batch: CanvasBatch, input_batch: InputBatch) -> StepInputs:
        """Reads the slots as `SeededStep` does, and sets `drafts`: which canvases are drafts, and
        which of these this step verifies. `drafts` stays None if no request of the batch has its
        drafts verified."""
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
        tokens = self.grammars.legal_verified_tokens(
            batch, inputs.starts, counts, canvas, draws, choice.candidates.tokens, lead=1
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

    def _keep_seed_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of drafts' first tokens, for log-probabilities: the rows of a verified
        draft predict the tokens behind them."""
        logprobs = self.requests.logprobs
        are_drafts = self.slot_settings.are_verified(rows.slots_np)
        kept = logits.all_rows(in_process=logprobs.reports_processed)
        for i in np.flatnonzero(are_drafts).tolist():
            own = None if is_new is None else is_new[i : i + 1]
            logprobs.keep_seed_logits([int(rows.slots_np[i])], kept[i : i + 1], own)
