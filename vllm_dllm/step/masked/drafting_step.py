"""Steps of requests with `diffusion_acceptance` "verified". In turn, one drafts all hidden
positions of a canvas, and the next one reads the draft causally and reveals what it agrees with
(`denoise.masked.verify_step`).

Both draw a position by the same number, so that they agree often, and the answer does not depend on
the drafts. The finished block is prefilled like any other. Subclasses differ in which rows verify a
position.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise.masked import Candidates, Held, MaskedRules, verify_step
from vllm_dllm.step.asked.grammar_runs import GrammarRuns, LegalDraws
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings, MaskedStepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Found
from vllm_dllm.step.masked.masked_step import Decided, MaskedStep
from vllm_dllm.step.slots import Index


class DraftingStep(MaskedStep):
    """Verifies drafts of requests that ask for it. Canvases of other requests are denoised as in
    `MaskedStep`."""

    @property
    def verifying_causal(self) -> int:
        """`causal` of requests whose drafts this step verifies, see `attention_kernels.masks`. In
        this class, they are causal."""
        return 1

    def may_verify(self, input_batch: InputBatch) -> bool:
        """Returns whether any request of the batch has its drafts verified. Does not wait for the
        device."""
        settings = self.requests.settings
        assert isinstance(settings, MaskedSlotSettings)
        slots_np = input_batch.idx_mapping_np[: input_batch.num_reqs]
        return bool(settings.are_verified(slots_np).any())

    def verifies(self, slots: Index) -> torch.Tensor:
        """Returns [n] bool: slots whose canvas holds a draft and is not committed next. The coming
        step reads such a draft causally."""
        return self.slots.holds_draft[slots, 0] & ~self.slots.is_committing(slots)

    def can_draft(self, batch: CanvasBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases for whose drafts this step has rows that verify them. Others
        keep their masks, and each step but the first reveals their first one. Returns None if all
        can, as in this class."""
        return None

    def _noise(self, found: Found) -> torch.Tensor:
        """Returns the noise. Requests whose drafts are verified draw a position by the same number
        in all steps."""
        settings = found.settings
        assert isinstance(settings, MaskedStepSettings)
        if settings.is_verified is None:
            return super()._noise(found)
        steps_done = found.numbers.steps_done.masked_fill(settings.is_verified, 0)
        return super()._noise(found._replace(numbers=found.numbers._replace(steps_done=steps_done)))

    def _decide(
        self,
        found: Found,
        draws: LegalDraws,
        candidates: Candidates,  # [n, C]
        rules: MaskedRules,
        held: Held | None,
    ) -> Decided:
        """Drafts, or verifies drafts, for requests that ask for it. Writes `holds_draft` of their
        slots. Moves their grammars on, and then waits for the device."""
        decided, settings = super()._decide(found, draws, candidates, rules, held), found.settings
        assert isinstance(settings, MaskedStepSettings)
        if settings.is_verified is None:
            return decided
        slots, idx = self.slots, found.batch.slot_index
        is_draft, before = self.verifies(idx), slots.canvas[idx]
        grammars = self.requests.grammars
        assert isinstance(grammars, GrammarRuns)
        counts = settings.is_verified & (found.numbers.is_committing == 0)
        if found.cut is not None:
            counts &= ~found.cut
        tokens = grammars.legal_verified_tokens(
            found.batch, found.starts, counts & is_draft, before, draws, candidates.tokens, lead=0
        )
        tokens = grammars.legal_drafts(found.batch, found.starts, counts & ~is_draft, draws, tokens)
        own = verify_step(
            tokens,
            before,
            slots.revealed[idx],
            self._counted_positions(found),
            is_draft,
            found.stops,
            self.mask_id,
        )
        canvas, can_draft = own.canvas, self.can_draft(found.batch)
        if can_draft is not None:
            canvas = torch.where((is_draft | can_draft)[:, None], canvas, before)
            is_draft = is_draft & can_draft  # masks are read causally again
        slots.holds_draft[idx, 0] = settings.is_verified & ~is_draft & ~own.finished
        rows = settings.is_verified[:, None]
        return decided._replace(
            canvas=torch.where(rows, canvas, decided.canvas),
            tokens=torch.where(rows, own.tokens, decided.tokens),
            revealed=torch.where(rows, own.revealed, decided.revealed),
            finished=torch.where(settings.is_verified, own.finished, decided.finished),
        )
