"""Steps of requests with `diffusion_acceptance` "verified". One step drafts all hidden positions of
a canvas. The next step reads the draft causally and reveals the tokens on which both steps agree
(`denoise.masked.verify_step`). Then the next draft follows.

Both steps draw a position by the same number, so that they agree often, and the answer does not
depend on the drafts. The finished block is prefilled like any other. Subclasses differ in which
rows verify a position.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise.masked import MaskedOutcome, verify_step
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import StepInputs
from vllm_dllm.step.masked.masked_step import Choice, MaskedStep
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
        slots_np = input_batch.idx_mapping_np[: input_batch.num_reqs]
        return bool(self.slot_settings.are_verified(slots_np).any())

    def verifies(self, slots: Index) -> torch.Tensor:
        """Returns [n] bool: slots whose canvas holds a draft and is not committed next. The coming
        step reads such a draft causally."""
        return self.slots.holds_draft[slots, 0] & ~self.slots.are_committing(slots)

    def can_draft(self, batch: CanvasBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases for whose drafts this step has rows that verify them. Others
        keep their masks, and each step but the first reveals their first one. Returns None if all
        can, as in this class."""
        return None

    def _noise(self, inputs: StepInputs) -> torch.Tensor:
        """Returns the noise. Requests whose drafts are verified draw a position by the same number
        in all steps."""
        is_verified = self._settings_of(inputs).is_verified
        if is_verified is None:
            return super()._noise(inputs)
        steps_done = inputs.numbers.steps_done.masked_fill(is_verified, 0)
        numbers = inputs.numbers._replace(steps_done=steps_done)
        return super()._noise(inputs._replace(numbers=numbers))

    def _decide(self, inputs: StepInputs, choice: Choice) -> MaskedOutcome:
        """Drafts, or verifies drafts, for requests that ask for it. Writes `holds_draft` of their
        slots. Moves their grammars on, and then waits for the device."""
        decided = super()._decide(inputs, choice)
        is_verified = self._settings_of(inputs).is_verified
        if is_verified is None:
            return decided
        slots, idx = self.slots, inputs.batch.slot_index
        is_draft, before = self.verifies(idx), slots.canvas[idx]
        own = verify_step(
            self._legal_tokens(inputs, choice, is_verified, is_draft),
            before,
            slots.revealed[idx],
            valid=self._counted_positions(inputs),
            is_draft=is_draft,
            stops=inputs.stops,
            mask_id=self.mask_id,
        )
        canvas, can_draft = own.canvas, self.can_draft(inputs.batch)
        if can_draft is not None:
            canvas = torch.where((is_draft | can_draft)[:, None], canvas, before)
            is_draft = is_draft & can_draft  # masks are read causally again
        slots.holds_draft[idx, 0] = is_verified & ~is_draft & ~own.finished
        rows = is_verified[:, None]
        return decided._replace(
            canvas=torch.where(rows, canvas, decided.canvas),
            tokens=torch.where(rows, own.tokens, decided.tokens),
            revealed=torch.where(rows, own.revealed, decided.revealed),
            finished=torch.where(is_verified, own.finished, decided.finished),
        )

    def _legal_tokens(
        self,
        inputs: StepInputs,
        choice: Choice,
        is_verified: torch.Tensor,  # [n] bool, canvases whose drafts are verified
        is_draft: torch.Tensor,  # [n] bool, those of them that hold a draft; it is verified now
    ) -> torch.Tensor:
        """Returns [n, C] int64: the candidates, legal ones in verified canvases with a grammar.
        Moves grammars on, and then waits for the device. Costs nothing without a grammar."""
        batch, tokens = inputs.batch, choice.candidates.tokens
        if not self.grammars.any_in(batch):
            return tokens
        counts, canvas = is_verified & ~inputs.skips_grammars, self.slots.canvas[batch.slot_index]
        tokens = self.grammars.legal_verified_tokens(
            batch, inputs.starts, counts & is_draft, canvas, choice.draws, tokens, lead=0
        )
        return self.grammars.legal_drafts(
            batch, inputs.starts, counts & ~is_draft, choice.draws, tokens
        )
