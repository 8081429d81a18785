"""Steps of models whose rows have the logits of the next token.

The candidate of a position comes from the row before it. Before a canvas' first position, that is a
known token of the same block, which each step computes anew beside the canvas. Where the canvas
begins its block, it is the last row of the block before, and the first token was sampled when that
block was prefilled (`seeded_step`).

Since rows predict the next token, a causal forward verifies a block that is filled with guesses.
Requests with `diffusion_acceptance` "verified" take such steps in turn: one drafts all hidden
positions, the next one reads them causally and reveals what it agrees with
(`denoise.masked.verify_step`). Both draw a position by the same number, so that they agree often,
and the answer does not depend on the drafts. The finished block is prefilled like any other.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise.masked import Candidates, Held, MaskedRules, verify_step
from vllm_dllm.step.asked.grammar_runs import LegalDraws
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings, MaskedStepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Found
from vllm_dllm.step.logits.canvas_logits import MaskedLogits
from vllm_dllm.step.masked.masked_step import Decided
from vllm_dllm.step.masked.seeded_step import SeededStep
from vllm_dllm.step.slots import Index


class ShiftedStep(SeededStep):
    """Draws the candidate of each position from the row before it. Verifies drafts of requests that
    ask for it."""

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

    def begin_step(self, input_batch: InputBatch) -> None:
        """Moves the canvases' rows in `input_batch.logits_indices` back by one, so that the runner
        computes the logits of the row before each position. The first row of a block stays."""
        super().begin_step(input_batch)
        batch = self.batch
        if batch is None:
            return
        back = torch.zeros_like(input_batch.logits_indices)
        back[: int(batch.lengths_np.sum())] = 1
        starts = input_batch.seq_lens[batch.request_index] - batch.lengths
        is_inside = starts % self.canvas_length != 0
        # A block's first row stands in for the one before it, which is not in this forward.
        back.index_copy_(0, batch.first_rows, is_inside.to(back.dtype))
        input_batch.logits_indices = input_batch.logits_indices - back

    def _keep_seed_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of first tokens, for log-probabilities: a canvas that begins its block
        has no row for them."""
        kept = logits.all_rows(in_process=False)
        self.requests.logprobs.keep_seed_logits(rows.slots_np.tolist(), kept, is_new)

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
        """Drafts, or verifies drafts, for requests that ask for it and have no grammar. Writes
        `holds_draft` of their slots."""
        decided, settings = super()._decide(found, draws, candidates, rules, held), found.settings
        assert isinstance(settings, MaskedStepSettings)
        if settings.is_verified is None:
            return decided
        slots, idx = self.slots, found.batch.slot_index
        is_verified = settings.is_verified
        if held is not None:
            is_verified = is_verified & ~held.is_ruled
        is_draft = self.verifies(idx)
        own = verify_step(
            candidates.tokens,
            slots.canvas[idx],
            slots.revealed[idx],
            self._counted_positions(found),
            is_draft,
            found.stops,
            self.mask_id,
        )
        slots.holds_draft[idx, 0] = is_verified & ~is_draft & ~own.finished
        rows = is_verified[:, None]
        return decided._replace(
            canvas=torch.where(rows, own.canvas, decided.canvas),
            tokens=torch.where(rows, own.tokens, decided.tokens),
            revealed=torch.where(rows, own.revealed, decided.revealed),
            finished=torch.where(is_verified, own.finished, decided.finished),
        )

    def _denoise(self, found: Found, source: torch.Tensor) -> Denoised:
        """Denoises the canvases. First overwrites, in `source`, the first row of each canvas that
        begins its block with the logits kept for it, because no row of this forward predicts that
        position."""
        begins_block = found.starts % self.canvas_length == 0
        self.requests.logprobs.restore_seed_logits(found.batch, source, begins_block)
        return super()._denoise(found, source)
