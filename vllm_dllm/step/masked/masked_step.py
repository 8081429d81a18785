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
from vllm_dllm.denoise import masked, noise
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.denoise.step import CanvasState, StepOutcome
from vllm_dllm.requests.ends import EVERY_BLOCK
from vllm_dllm.step.asked.grammar_runs import GrammarRuns
from vllm_dllm.step.asked.logprob_tensors import Placements
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings, MaskedStepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, StepInputs, VerifiedDrafts
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.masked_logits import MaskedLogits, RowDraws, RowNoise
from vllm_dllm.step.requests import StepRequests


class Choice(NamedTuple):
    """What a step may write into n canvases, and the rules that choose among it."""

    draws: RowDraws
    candidates: masked.Candidates  # fields [n, C]
    rules: masked.MaskedRules
    by_grammar: masked.GrammarReveal | None  # None: no canvas has a grammar


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
        self.slot_settings = MaskedSlotSettings(
            len(self.slots.canvas),
            self.canvas_length,
            self.device,
            reveals_at_threshold=self.family.is_causal,
            may_reveal_none=self.family.moves_tokens,
        )
        settings = self.slot_settings
        requests = StepRequests(self.slots, sampler, settings, vllm_config, self.mask_id)
        assert isinstance(requests.grammars, GrammarRuns)
        self.grammars = requests.grammars
        return requests

    def _settings_of(self, inputs: StepInputs) -> MaskedStepSettings:
        assert isinstance(inputs.settings, MaskedStepSettings)
        return inputs.settings

    def num_recomputed(
        self, batch: CanvasBatch | None, input_batch: InputBatch
    ) -> torch.Tensor | None:
        """Returns [num_reqs] int64: known tokens of each request in a block that is not full."""
        known_ends = input_batch.seq_lens[: input_batch.num_reqs].long()
        if batch is not None:
            known_ends = known_ends.index_add(0, batch.requests, -batch.lengths_with_copies)
        return known_ends % self.block_length

    def _cut_canvases(self, inputs: StepInputs, input_batch: InputBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases of which the scheduler ran only a part. Returns None if surely
        none is cut. A whole canvas ends where its last block or the context ends."""
        batch = inputs.batch
        if not self.requests.joins_commits:  # the host may not know where canvases begin
            if (batch.lengths_np == self.canvas_length).all():
                return None
            ends = inputs.starts + batch.lengths
            return (ends % self.canvas_length != 0) & (ends != self.requests.max_model_len)
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]  # exact, here
        is_cut = (ends % self.canvas_length != 0) & (ends != self.requests.max_model_len)
        return async_tensor_h2d(is_cut, device=self.device) if is_cut.any() else None

    def _parts(self, inputs: StepInputs) -> torch.Tensor | None:
        """Returns [n, C] int64: the part of its canvas that each position belongs to. Parts are
        revealed one after another. Returns None if a canvas is one part."""
        if self.part_length is None:
            return None
        return self._positions(inputs) % self.canvas_length // self.part_length

    def _counted_positions(self, inputs: StepInputs) -> torch.Tensor | None:
        """Returns [n, C] bool: positions that must be revealed before a canvas is finished. Returns
        None if all must. With several blocks in flight, positions behind the answer's end do not
        count."""
        batch, end = inputs.batch, inputs.numbers.end[:, None]
        if self.blocks_in_flight == 1:
            return batch.valid
        counts = (self._positions(inputs) < end) | (end == EVERY_BLOCK)
        canvas, idx = self.slots.canvas[batch.slot_index], batch.slot_index
        is_stop = (canvas[:, :, None] == inputs.stops[:, None, :]).any(dim=-1)
        is_stop &= self.slots.revealed[idx]
        counts &= is_stop.cumsum(dim=-1) == is_stop
        return counts if batch.valid is None else counts & batch.valid

    def _ahead(
        self, rules: masked.MaskedRules, settings: MaskedStepSettings
    ) -> masked.Ahead | None:
        """Returns how positions behind the first unfinished block are revealed. Returns None if
        none are."""
        if self.blocks_in_flight == 1:
            return None
        return masked.Ahead(masked.threshold_ahead(rules.threshold), settings.blocks_in_flight)

    def _reveal_by_grammars(
        self, inputs: StepInputs, rules: masked.MaskedRules, draws: RowDraws
    ) -> masked.GrammarReveal | None:
        """Returns what grammars reveal in this step, and moves them on. Waits for the device.
        Returns None, without waiting, if they reveal nothing: drafts are verified elsewhere."""
        batch, skipped = inputs.batch, inputs.skips_grammars
        ruled = self.grammars.canvases_with_grammar(batch)
        if self.slot_settings.are_verified(batch.slots_np[ruled]).all():
            return None
        if (is_verified := self._settings_of(inputs).is_verified) is not None:
            skipped |= is_verified
        return self.grammars.reveal_runs(inputs, skipped, rules, draws, self.part_length)

    def _draws(self, inputs: StepInputs, source: torch.Tensor) -> RowDraws:
        """Returns the step's logits, made of `source` [rows, V], with the temperatures and the
        noise that candidates are drawn by."""
        batch, settings = inputs.batch, self._settings_of(inputs)
        slots, idx = self.slots, batch.slot_index
        are_scaled = self.slot_settings.are_scaled(batch)
        drawn_by = RowNoise(
            batch,
            self.logit_tools,
            batch.expand_to_rows(settings.temperature)[:, None],
            batch.flatten(self._noise(inputs)) if are_scaled else None,
            batch.expand_to_rows(settings.is_greedy),
        )
        context = RuleContext(
            batch,
            inputs.starts,
            inputs.tokens.best_guess,
            kept=torch.where(slots.revealed[idx], slots.canvas[idx], NO_TOKEN),
            leads=self._leads(inputs),
            draw=drawn_by.draw_tokens if are_scaled else None,
        )
        logits = MaskedLogits(source, context, self.logit_tools)
        return RowDraws(logits, drawn_by, judges_unscaled=self.family.is_causal and are_scaled)

    def _noise(self, inputs: StepInputs) -> torch.Tensor:
        """Returns [n, C] float64 in [0, 1): the uniform numbers that candidates are drawn by."""
        numbers, positions = inputs.numbers, self._positions(inputs)
        return noise.uniform(numbers.noise_key, positions, numbers.steps_done, noise.CANDIDATE)

    def _leads(self, inputs: StepInputs) -> dict[int, torch.Tensor]:
        """Returns, by index of the canvas, how many positions ahead its rows predict: [] int64, see
        `CanvasRules`. Canvases without an entry predict their own, here all."""
        return {}

    def _verify_drafts(self, inputs: StepInputs, choice: Choice) -> VerifiedDrafts | None:
        """Hook: returns what becomes of canvases that are drafts. Returns None if no canvas is one,
        as in this class."""
        return None

    def _positions(self, inputs: StepInputs) -> torch.Tensor:
        """Returns [n, C] int64: the absolute position of each row."""
        return inputs.starts[:, None] + torch.arange(self.canvas_length, device=self.device)

    def _rules(self, inputs: StepInputs) -> masked.MaskedRules:
        """Returns the rules by which this step chooses the positions that it reveals."""
        numbers = inputs.numbers
        settings = self._settings_of(inputs)
        return settings.rules(numbers.steps_done, numbers.num_steps, self.canvas_length)

    def _decide(self, inputs: StepInputs, choice: Choice) -> masked.MaskedOutcome:
        """Decides what the canvases hold after this step, and which are finished."""
        settings, by_grammar = self._settings_of(inputs), choice.by_grammar
        slots, idx = self.slots, inputs.batch.slot_index
        edits = settings.edits(inputs.numbers.times_repeated)
        canvas, revealed = slots.canvas[idx], slots.revealed[idx]
        if edits is not None:
            if by_grammar is not None:
                edits = edits._replace(is_chosen=edits.is_chosen & ~by_grammar.is_ruled)
            if self.requests.filters.canvases_with_bad_words(inputs.batch):
                # Hidden positions take no token that completes a word with those that are kept.
                candidates = choice.candidates.tokens
                barred = self.requests.filters.spelling_changes(
                    inputs,
                    torch.where(revealed, canvas, candidates),
                    masked.changed_tokens(choice.candidates, canvas, revealed, edits),
                    candidates,
                )
                edits = edits._replace(barred=barred)
        ends_by_stops = self.family.knows_first_token or self.blocks_in_flight > 1
        return masked.masked_step(
            choice.candidates,
            canvas,
            revealed,
            self._counted_positions(inputs),
            choice.rules,
            edits,
            self.mask_id,
            stops=inputs.stops if ends_by_stops else None,
            parts=self._parts(inputs),
            by_grammar=by_grammar,
            ahead=self._ahead(choice.rules, settings),
        )

    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Draws a candidate for each position, and reveals some of them. Moves grammars on."""
        batch, numbers, draws = inputs.batch, inputs.numbers, self._draws(inputs, source)
        candidates = masked.Candidates(*(batch.unflatten(column) for column in draws.draw_all()))
        rules = self._rules(inputs)
        choice = Choice(draws, candidates, rules, self._reveal_by_grammars(inputs, rules, draws))
        decided = self._decide(inputs, choice)
        tokens, revealed, finished = decided.tokens, decided.revealed, decided.finished
        edit_steps_done, is_committed = numbers.times_repeated, None
        if decided.edited is not None:
            edit_steps_done = decided.edited.steps_done.masked_fill(finished | inputs.commits, 0)
            # The rows of a step that changed nothing saw what a prefill's see. But where first
            # tokens are known, a block's prefill also predicts the next one's.
            is_committed = None if self.family.knows_first_token else decided.edited.unchanged
        placements, steps_done = None, numbers.steps_done + 1
        if self.requests.logprobs.needs_placements(batch):
            canvas, idx = self.slots.canvas, batch.slot_index
            stayed = self.slots.revealed[idx] & (tokens == canvas[idx])
            placements = Placements(revealed & ~stayed, steps_done)
        return Denoised(
            logits=draws.logits,
            temperature=self._settings_of(inputs).temperature,
            row_temperature=draws.noise.temperature,
            stats=RowStats(tokens, tokens, candidates.entropy_nats, candidates.probability.log()),
            soft_rows=None,
            next_canvas=torch.full_like(tokens, self.mask_id),
            outcome=StepOutcome(
                decided.canvas,
                revealed,
                CanvasState(tokens, edit_steps_done, steps_done, numbers.num_steps),
                finished,
                revealed=finished,
            ),
            revealed=revealed,
            is_committed=is_committed,
            placements=placements,
            verified=self._verify_drafts(inputs, choice),
        )
