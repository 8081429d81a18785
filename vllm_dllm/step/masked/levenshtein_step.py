"""One step of LLaDA2.2's canvases: a candidate may delete the token at its position, or insert a
mask before it.

A block is finished by a step that found nothing hidden and changed nothing, or after `edit_steps`
consecutive steps that found none of the masks the block began with. The last of these reveals all
positions, and neither deletes nor inserts, so a finished block holds no delete or insert token. We
differ from the published loop in two things: a block also ends that way after `MOST_STEPS`, where
the loop may leave masks; and tokens of the prompt are data, whatever they are. Blocks of requests
with a grammar or bad words of several tokens neither delete nor insert.
"""

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise import levenshtein, noise
from vllm_dllm.denoise.masked import Edited, GrammarReveal, MaskedOutcome, MaskedRules
from vllm_dllm.step.canvas_stages import StepInputs
from vllm_dllm.step.logits.masked_logits import RowDraws
from vllm_dllm.step.masked.masked_step import Choice, MaskedStep

MOST_STEPS = 1000
"""The most denoise steps of a block. The last of them reveals all that is hidden."""
_TRIES = 5  # tokens that a step replaces to get a block out of a loop


class LevenshteinStep(MaskedStep):
    """Edits blocks by `denoise.levenshtein`: reveals, replaces, deletes and inserts tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.config.edit_tokens is not None, "of a family that moves tokens"
        self.tokens = levenshtein.EditTokens(self.mask_id, *self.config.edit_tokens)
        self.requests.filters.moving_tokens = self.config.edit_tokens
        self._edit_token_ids = torch.tensor(self.config.edit_tokens, device=self.device)
        # By slot. A block's first step reads neither.
        # [R, C], see `Round.original`
        self._original = torch.zeros_like(self.slots.canvas, dtype=torch.bool)
        # [R, MOST_STEPS] int64: fingerprints of what the block's steps have written
        self._written = self.slots.canvas.new_zeros(len(self.slots.canvas), MOST_STEPS)

    def _rules(self, inputs: StepInputs) -> MaskedRules:
        """Returns the step's rules, with even shares of each canvas' own length."""
        numbers = inputs.numbers
        settings = self._settings_of(inputs)
        return settings.rules(numbers.steps_done, numbers.num_steps, inputs.batch.lengths)

    def _draws(self, inputs: StepInputs, source: torch.Tensor) -> RowDraws:
        """Returns the draws with two changes: revealed positions draw their most probable token,
        and probabilities are those before temperature and truncation."""
        draws, batch = super()._draws(inputs, source), inputs.batch
        if draws.noise.uniform is None:
            return draws
        revealed = batch.flatten(self.slots.revealed[batch.slot_index])
        drawn_by = draws.noise._replace(is_greedy=draws.noise.is_greedy | revealed)
        return draws._replace(noise=drawn_by, judges_unscaled=True)

    def _reveal_by_grammars(
        self, inputs: StepInputs, rules: MaskedRules, draws: RowDraws
    ) -> GrammarReveal | None:
        """Returns what grammars reveal: at least one token a step. Excludes delete and insert
        tokens from the logits of canvases with a grammar, in place."""
        ruled = self.grammars.canvases_with_grammar(inputs.batch)
        draws.logits.exclude_tokens(ruled, self._edit_token_ids)
        rules = rules._replace(least=rules.least.clamp(min=1))
        return super()._reveal_by_grammars(inputs, rules, draws)

    def _decide(self, inputs: StepInputs, choice: Choice) -> MaskedOutcome:
        """Writes candidates into the canvases, deletes and inserts tokens, and decides which blocks
        are finished. Stores the block's original masks and fingerprints for its next steps."""
        batch, numbers, settings = inputs.batch, inputs.numbers, self._settings_of(inputs)
        idx, filters, stays = batch.slot_index, self.requests.filters, None
        if choice.by_grammar is not None:
            stays = choice.by_grammar.is_ruled
        if ruled := filters.canvases_with_bad_words(batch):
            has_words = np.isin(np.arange(batch.num_canvases), ruled)
            on_device = async_tensor_h2d(has_words, device=self.device)
            stays = on_device if stays is None else stays | on_device
        step = levenshtein.begin_round(
            self.slots.canvas[idx],
            batch.valid,
            self._original[idx],
            steps_done=numbers.steps_done,
            post_steps=numbers.times_repeated,
            most_post_steps=settings.edit_steps,
            most_steps=MOST_STEPS,
            mask_id=self.mask_id,
            stays=stays,
        )
        edit_threshold = settings.edit_threshold
        if edit_threshold is None:  # a warm-up's
            edit_threshold = torch.zeros_like(settings.threshold)
        candidates = choice.candidates
        barred = None
        if ruled:
            barred = filters.spelling_changes(
                inputs,
                torch.where(step.hidden, candidates.tokens, step.canvas),
                levenshtein.likely_edits(step, candidates, edit_threshold),
                candidates.tokens,
            )
        written = levenshtein.write_candidates(
            step,
            candidates,
            otherwise=batch.unflatten(choice.draws.draw_all_without(self._edit_token_ids)),
            rules=choice.rules,
            reveals_all=numbers.steps_done >= numbers.num_steps,
            edit_threshold=edit_threshold,
            by_grammar=choice.by_grammar,
            edit_tokens=self.tokens,
            barred=barred,
        )
        written, mark = self._leave_loops(inputs, choice.draws, step, written)
        moved = levenshtein.delete_and_insert(step, written, self.tokens)
        hidden = moved.canvas == self.mask_id
        if batch.valid is not None:
            hidden &= batch.valid
        is_full = ~hidden.any(dim=-1)
        unchanged = is_full & (moved.canvas == step.canvas).all(dim=-1)
        if choice.by_grammar is not None:
            unchanged &= ~choice.by_grammar.is_ruled
        self._store_round(inputs, moved.original, mark)
        return MaskedOutcome(
            canvas=moved.canvas,
            tokens=moved.canvas,
            revealed=~hidden if batch.valid is None else ~hidden & batch.valid,
            finished=is_full & (unchanged | step.keeps_places)
            | (numbers.steps_done + 1 >= MOST_STEPS),
            edited=Edited(step.post_steps, unchanged),
        )

    def _leave_loops(
        self,
        inputs: StepInputs,
        draws: RowDraws,
        step: levenshtein.Round,
        written: torch.Tensor,  # [n, C] int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gets blocks that may move tokens out of loops. As long as a canvas equals one that an
        earlier step of its block wrote, another token is drawn for one of the positions that this
        step changes, at most `_TRIES` times. Returns the canvases [n, C] int64 and their
        fingerprints [n] int64."""
        batch, numbers, idx = inputs.batch, inputs.numbers, inputs.batch.slot_index
        mark = levenshtein.fingerprint(written, step.valid)
        steps = torch.arange(MOST_STEPS, device=self.device)
        earlier = steps < numbers.steps_done[:, None]
        past = self._written[idx]
        draw = noise.uniform(
            numbers.noise_key,
            inputs.starts[:, None] + torch.arange(2 * _TRIES, device=self.device),
            numbers.steps_done,
            noise.ESCAPE,
        )
        may_escape = ~step.keeps_places
        for turn in range(_TRIES):
            changed = written != step.canvas
            count = changed.sum(dim=-1)
            is_known = ((past == mark[:, None]) & earlier).any(dim=-1)
            may_escape = may_escape & (count > 0) & is_known
            nth = (draw[:, turn] * count).long() + 1
            place = (changed.cumsum(dim=-1) >= nth[:, None]).long().argmax(dim=-1)[:, None]
            rows = batch.first_rows + place[:, 0]
            another = draws.draw_rows_without(
                rows, written.gather(1, place), draw[:, _TRIES + turn]
            )
            written = torch.where(
                may_escape[:, None], written.scatter(1, place, another[:, None]), written
            )
            mark = levenshtein.fingerprint(written, step.valid)
        return written, mark

    def _store_round(self, inputs: StepInputs, original: torch.Tensor, mark: torch.Tensor) -> None:
        """Stores `original` [n, C] bool and the fingerprints `mark` [n] int64 for the blocks' next
        steps. A step that is taken back stores no masks, and the step that repeats it overwrites
        its fingerprint."""
        idx = inputs.batch.slot_index
        if inputs.cut is not None:
            original = torch.where(inputs.cut[:, None], self._original[idx], original)
        self._original[idx] = original
        place = inputs.numbers.steps_done.clamp(max=MOST_STEPS - 1)
        self._written[inputs.batch.slots, place] = mark
