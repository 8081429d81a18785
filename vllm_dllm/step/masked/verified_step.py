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
from vllm_dllm.step.asked.grammar_runs import GrammarRuns, LegalDraws
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings, MaskedStepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Drafts, Found, Verified
from vllm_dllm.step.logits.canvas_logits import MaskedLogits
from vllm_dllm.step.masked.seeded_step import CausalStep


class VerifiedStep(CausalStep):
    """Makes and verifies drafts. Canvases that are no drafts are denoised as in `CausalStep`."""

    def _are_drafts(self, batch: CanvasBatch) -> np.ndarray:
        """Returns [n] bool: which canvases are drafts."""
        assert isinstance(self.requests.settings, MaskedSlotSettings)
        return self.requests.settings.are_verified(batch.slots_np)

    def _predicts_next_seed(self, batch: CanvasBatch) -> np.ndarray:
        return ~self._are_drafts(batch)

    def _read_slots(self, batch: CanvasBatch, input_batch: InputBatch) -> Found:
        """Reads the slots, and finds which canvases are drafts."""
        found = super()._read_slots(batch, input_batch)
        are_np, settings = self._are_drafts(batch), found.settings
        if not are_np.any():
            return found
        assert isinstance(settings, MaskedStepSettings) and settings.is_verified is not None
        are = settings.is_verified
        return found._replace(drafts=Drafts(are_np, are, are & (found.numbers.is_committing == 1)))

    def _noise(self, found: Found) -> torch.Tensor:
        """Returns the noise. It is the same for a position in both steps of a draft: a row that is
        verified predicts the position after its own."""
        if found.drafts is None:
            return super()._noise(found)
        are, numbers = found.drafts.are, found.numbers
        return noise.uniform(
            numbers.noise_key,
            self._positions(found) + found.drafts.are_verified[:, None],
            numbers.steps_done.masked_fill(are, 0),
            torch.where(are, noise.INITIAL, noise.CANDIDATE),
        )

    def _leads(self, found: Found) -> dict[int, torch.Tensor]:
        """Returns 1 for drafts that this step verifies and 0 for drafts that it makes, by index of
        the canvas. Only canvases whose requests have rules have an entry."""
        drafts = found.drafts
        if drafts is None:
            return {}
        ruled = self.requests.filters.canvases_with_rules(found.batch)
        return {i: drafts.are_verified[i].long() for i in ruled if drafts.are_np[i]}

    def _denoise(self, found: Found, source: torch.Tensor) -> Denoised:
        """Denoises the canvases. Log-probabilities of drafts are those before the temperature, as
        for an autoregressive model."""
        denoised, logprobs = super()._denoise(found, source), self.requests.logprobs
        if found.drafts is None or logprobs.reports_processed or not logprobs.any_in(found.batch):
            return denoised
        are = found.batch.expand_to_rows(found.drafts.are)[:, None]
        row_temperature = denoised.row_temperature.masked_fill(are, 1.0)
        return denoised._replace(row_temperature=row_temperature)

    def _verified(self, found: Found, draws: LegalDraws, tokens: torch.Tensor) -> Verified | None:
        """Draws the token behind each row of the drafts that are verified. Accepts drafted tokens
        up to the first that differs from the drawn one. Returns None if no canvas is a draft."""
        drafts, grammars = found.drafts, self.requests.grammars
        if drafts is None:
            return None
        assert isinstance(grammars, GrammarRuns)
        batch, ends, C = found.batch, found.numbers.end, self.canvas_length
        canvas = self.slots.canvas[batch.slot_index]
        counts = drafts.are_verified if found.cut is None else drafts.are_verified & ~found.cut
        tokens = grammars.legal_verified_tokens(
            batch, found.starts, counts, canvas, draws, tokens, lead=1
        )
        matches = tokens[:, :-1] == canvas[:, 1:]
        if batch.valid is not None:
            matches &= batch.valid[:, 1:]
        num_accepted = 1 + matches.long().cumprod(dim=-1).sum(dim=-1)  # 1..C
        next_token = tokens.gather(1, num_accepted[:, None] - 1)
        self.requests.logprobs.shift_draft_logits(batch, draws.logits, num_accepted, counts)

        # What ends the answer needs no forward of its own.
        behind = found.starts + num_accepted
        is_over = is_last_block(next_token, None, behind + 1, ends, found.stops)
        is_next = torch.arange(C, device=self.device) == num_accepted[:, None]
        emitted = num_accepted + (is_over & (behind < ends) & (num_accepted < C))
        begins_over = is_last_block(canvas[:, :1], None, found.starts + 1, ends, found.stops)
        return Verified(
            drafts,
            torch.where(is_next, next_token, canvas),
            torch.where(drafts.are_verified, emitted, begins_over),
            next_token[:, 0],
        )

    def _keep_seed_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of drafts' first tokens, for log-probabilities: the rows of a verified
        draft predict the tokens behind them."""
        logprobs, are_drafts = self.requests.logprobs, self._are_drafts(rows)
        kept = logits.all_rows(in_process=logprobs.reports_processed)
        for i in np.flatnonzero(are_drafts).tolist():
            own = None if is_new is None else is_new[i : i + 1]
            logprobs.keep_seed_logits([int(rows.slots_np[i])], kept[i : i + 1], own)
