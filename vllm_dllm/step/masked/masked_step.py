"""One step of a masked model's canvases: hidden positions are revealed, until none is left.

A canvas is one block of the model's, or several that are denoised together. Blocks are counted from
a request's first token, so the prompt's last tokens may share the first canvas' block, and the
canvas is what they leave of it. They see the canvas, so every step computes them anew, until the
canvas is finished and its blocks are prefilled whole.
"""

from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.masked import (
    Ahead,
    Candidates,
    Held,
    MaskedRules,
    masked_step,
    threshold_ahead,
)
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import CanvasState, StepOutcome
from vllm_dllm.requests.ends import EVERY_BLOCK
from vllm_dllm.step.asked.grammar_runs import GrammarRuns, LegalDraws
from vllm_dllm.step.asked.logprob_tensors import Placed
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings, MaskedStepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Found, Verified
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.canvas_logits import MaskedLogits
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.slots import SlotNumbers


class Decided(NamedTuple):
    """What a step decides about its n canvases."""

    canvas: torch.Tensor  # [n, C] int64, the next step's input
    tokens: torch.Tensor  # [n, C] int64, revealed ones, and best guesses elsewhere
    revealed: torch.Tensor  # [n, C] bool
    finished: torch.Tensor  # [n] bool
    edit_steps_done: torch.Tensor  # [n] int64, counted where other models count repeated guesses
    is_committed: torch.Tensor | None  # [n] bool, as in `Denoised`


class MaskedStep(CanvasStep):
    """Reveals hidden positions of canvases. Subclasses differ in which rows predict a position,
    which tokens are known before the first step, and whether revealed tokens may change."""

    self_conditions = False

    def _make_requests(self, vllm_config: VllmConfig, sampler: Any) -> StepRequests:
        """Returns the requests' state, and keeps what the checkpoint says of masks and blocks."""
        self.config = config = MaskedConfig.from_vllm_config(vllm_config)
        self.mask_id, self.family = config.mask_id, config.family
        self.block_length, self.blocks_in_flight = config.block_length, config.blocks_in_flight
        self.part_length = self.family.sub_block_length
        if self.part_length is None and self.blocks_in_flight > 1:
            self.part_length = self.block_length
        return StepRequests(
            self.slots,
            sampler,
            MaskedSlotSettings(
                len(self.slots.canvas),
                self.canvas_length,
                self.device,
                reveals_at_threshold=self.family.is_causal,
                may_reveal_none=self.family.moves_tokens,
            ),
            self.extension,
            vllm_config,
            self.mask_id,
            blocks_are_aligned=not self.family.is_causal,
        )

    def num_recomputed(self, input_batch: InputBatch) -> torch.Tensor | None:
        """Returns [num_reqs] int64: how many known tokens each request has in a block that they do
        not fill."""
        known_ends = input_batch.seq_lens[: input_batch.num_reqs].long()
        if self.batch is not None:
            rows = self.batch.lengths
            if self.batch.behind is not None:
                rows = rows + self.batch.behind
            known_ends = known_ends.index_add(0, self.batch.requests, -rows)
        return known_ends % self.block_length

    def _cut_canvases(
        self,
        batch: CanvasBatch,
        numbers: SlotNumbers,
        starts: torch.Tensor,
        input_batch: InputBatch,
    ) -> torch.Tensor | None:
        """Returns [n] bool: canvases of which the scheduler ran only a part. Returns None if surely
        none is cut. A whole canvas ends where its last block or the context ends."""
        if not self.requests.joins_commits:  # the host may not know where canvases begin
            if (batch.lengths_np == self.canvas_length).all():
                return None
            ends = starts + batch.lengths
            return (ends % self.canvas_length != 0) & (ends != self.max_model_len)
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]  # exact, here
        is_cut = (ends % self.canvas_length != 0) & (ends != self.max_model_len)
        return async_tensor_h2d(is_cut, device=self.device) if is_cut.any() else None

    def _parts(self, found: Found) -> torch.Tensor | None:
        """Returns [n, C] int64: the part of its canvas that each position belongs to. Parts are
        revealed one after another. Returns None if a canvas is one part."""
        if self.part_length is None:
            return None
        return self._positions(found) % self.canvas_length // self.part_length

    def _counted_positions(self, found: Found) -> torch.Tensor | None:
        """Returns [n, C] bool: positions that must be revealed before a canvas is finished. Returns
        None if all must. With several blocks in flight, positions behind the answer's end do not
        count."""
        batch, end = found.batch, found.numbers.end[:, None]
        if self.blocks_in_flight == 1:
            return batch.valid
        counts = (self._positions(found) < end) | (end == EVERY_BLOCK)
        canvas, idx = self.slots.canvas[batch.slot_index], batch.slot_index
        is_stop = (canvas[:, :, None] == found.stops[:, None, :]).any(dim=-1)
        is_stop &= self.slots.revealed[idx]
        counts &= is_stop.cumsum(dim=-1) == is_stop
        return counts if batch.valid is None else counts & batch.valid

    def _ahead(self, rules: MaskedRules, settings: MaskedStepSettings) -> Ahead | None:
        """Returns how positions behind the first unfinished block are revealed. Returns None if
        none are."""
        if self.blocks_in_flight == 1:
            return None
        return Ahead(threshold_ahead(rules.threshold), settings.blocks_in_flight)

    def _held(self, found: Found, rules: MaskedRules, draws: LegalDraws) -> Held | None:
        """Returns what grammars reveal in this step, and waits for the device to find it. Returns
        None if no canvas has a grammar."""
        grammars, settings = self.requests.grammars, found.settings
        assert isinstance(grammars, GrammarRuns) and isinstance(settings, MaskedStepSettings)
        skipped = found.numbers.is_committing == 1
        if settings.is_verified is not None:
            skipped |= settings.is_verified
        if found.cut is not None:
            skipped |= found.cut
        return grammars.reveal_runs(
            found.batch, found.starts, skipped, rules, draws, self.part_length
        )

    def _draws(self, found: Found, source: torch.Tensor) -> LegalDraws:
        """Returns the step's logits, made of `source` [rows, V], with the temperatures and the
        noise that candidates are drawn by."""
        batch, settings = found.batch, found.settings
        of_slots = self.requests.settings
        assert isinstance(settings, MaskedStepSettings) and isinstance(of_slots, MaskedSlotSettings)
        slots, idx = self.slots, batch.slot_index
        logits = MaskedLogits(
            source,
            batch,
            found.starts,
            found.tokens.best_guess,
            self.soft_embedding,
            self.requests.filters,
            self.memory,
            torch.where(slots.revealed[idx], slots.canvas[idx], NO_TOKEN),
            self._leads(found),
        )
        are_scaled, draw = of_slots.are_scaled(batch), None
        if are_scaled:
            draw = batch.flatten(self._noise(found))
        return LegalDraws(
            logits,
            batch.expand_to_rows(settings.temperature)[:, None],
            draw,
            batch.expand_to_rows(settings.is_greedy),
            judges_unscaled=self.family.is_causal and are_scaled,
        )

    def _noise(self, found: Found) -> torch.Tensor:
        """Returns [n, C] float64 in [0, 1): the uniform numbers that candidates are drawn by."""
        numbers, positions = found.numbers, self._positions(found)
        return noise.uniform(numbers.noise_key, positions, numbers.steps_done, noise.CANDIDATE)

    def _leads(self, found: Found) -> dict[int, torch.Tensor]:
        """Returns, by index of the canvas, how many positions ahead its rows predict: [] int64, see
        `CanvasRules`. Canvases without an entry predict their own positions. In this class, all
        do."""
        return {}

    def _verified(
        self,
        found: Found,
        draws: LegalDraws,
        tokens: torch.Tensor,  # [n, C] int64, candidates
    ) -> Verified | None:
        """Hook: returns what becomes of canvases that are drafts. Returns None if no canvas is one,
        as in this class."""
        return None

    def _positions(self, found: Found) -> torch.Tensor:
        """Returns [n, C] int64: the absolute position of each row."""
        return found.starts[:, None] + torch.arange(self.canvas_length, device=self.device)

    def _rules(self, found: Found) -> MaskedRules:
        """Returns the rules by which this step chooses the positions that it reveals."""
        numbers, settings = found.numbers, found.settings
        assert isinstance(settings, MaskedStepSettings)
        return settings.rules(numbers.steps_done, numbers.num_steps, self.canvas_length)

    def _decide(
        self,
        found: Found,
        draws: LegalDraws,
        candidates: Candidates,  # [n, C]
        rules: MaskedRules,
        held: Held | None,
    ) -> Decided:
        """Decides what the canvases hold after this step, and which are finished."""
        batch, numbers, settings = found.batch, found.numbers, found.settings
        assert isinstance(settings, MaskedStepSettings)
        slots, idx = self.slots, batch.slot_index
        edits = settings.edits(numbers.times_repeated)
        if held is not None and edits is not None:
            edits = edits._replace(is_chosen=edits.is_chosen & ~held.is_ruled)
        canvas, tokens, revealed, finished, edited = masked_step(
            candidates,
            slots.canvas[idx],
            slots.revealed[idx],
            self._counted_positions(found),
            rules,
            edits,
            self.mask_id,
            found.stops if self.family.is_seeded or self.blocks_in_flight > 1 else None,
            self._parts(found),
            held,
            self._ahead(rules, settings),
        )
        edit_steps_done, is_committed = numbers.times_repeated, None
        if edited is not None:
            is_over = finished | (numbers.is_committing == 1)
            edit_steps_done = edited.steps_done.masked_fill(is_over, 0)
            # The rows of a step that changed nothing saw what a prefill's see. But a seeded block's
            # prefill also predicts the next one's first token.
            if not self.family.is_seeded:
                is_committed = edited.unchanged
        return Decided(canvas, tokens, revealed, finished, edit_steps_done, is_committed)

    def _denoise(self, found: Found, source: torch.Tensor) -> Denoised:
        """Draws a candidate for each position, and reveals some of them. Moves grammars on."""
        batch, numbers, settings = found.batch, found.numbers, found.settings
        assert isinstance(settings, MaskedStepSettings)
        slots, idx = self.slots, batch.slot_index
        draws = self._draws(found, source)
        by_row = draws.draw_all()
        candidates = Candidates(*(batch.unflatten(column) for column in by_row))
        rules = self._rules(found)
        held = self._held(found, rules, draws)
        canvas, tokens, revealed, finished, edit_steps_done, is_committed = self._decide(
            found, draws, candidates, rules, held
        )
        placed = None
        if self.requests.logprobs.need_placed(batch):
            stayed = slots.revealed[idx] & (tokens == slots.canvas[idx])
            placed = Placed(revealed & ~stayed, numbers.steps_done + 1)
        state = CanvasState(tokens, edit_steps_done, numbers.steps_done + 1, numbers.num_steps)
        return Denoised(
            draws.logits,
            settings.temperature,
            draws.row_temperature,
            RowStats(tokens, tokens, candidates.entropy_nats, candidates.probability.log()),
            None,
            torch.full_like(tokens, self.mask_id),
            StepOutcome(canvas, revealed, state, finished, converged=None, revealed=finished),
            revealed,
            is_committed,
            placed,
            self._verified(found, draws, candidates.tokens),
        )
