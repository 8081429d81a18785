"""Steps of requests with `diffusion_acceptance` "verified". One step drafts all hidden positions of
a canvas. The next step reads the draft causally and reveals the tokens on which both steps agree
(`denoise.masked.verify_step`). Then the next draft follows.

Both steps draw a position by the same number, so that they agree often, and the answer does not
depend on the drafts. The finished block is prefilled like any other. Subclasses differ in which
rows verify a position.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise.masked import MaskedOutcome, verify_step
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, StepInputs
from vllm_dllm.step.logits.masked_logits import MaskedLogits
from vllm_dllm.step.masked.first_token_step import FirstTokenStep
from vllm_dllm.step.masked.masked_step import Choice, MaskedStep
from vllm_dllm.step.slots import Index


class DraftingStep(MaskedStep):
    """Verifies drafts of requests that ask for it. Others are denoised as in `MaskedStep`."""

    @property
    def verifying_causal(self) -> int:
        """`causal` of requests whose drafts this step verifies, see `attention_kernels.masks`. In
        this class, they are causal."""
        return 1

    def may_verify(self, input_batch: InputBatch) -> bool:
        """Returns whether any request of the batch has its drafts verified. Never waits."""
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
        """Returns the noise. Verified requests draw a position by the same number in all steps."""
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
        tokens = choice.candidates.tokens
        if not self.grammars.any_in(inputs.batch):
            return tokens
        counts = is_verified & ~inputs.skips_grammars
        return self.grammars.legal_drafts(inputs, counts, is_draft, choice.draws, tokens)


class CopiedStep(DraftingStep):
    """Verifies drafts in a second copy of their block: of models whose rows have the logits of
    their own positions, and see their whole block.

    A row that verifies a position must see the tokens before it, and a mask in its own place. So a
    draft is read with a second copy of its block behind it, all of it masks: keys and values of the
    copy are in the places of the next block, but its rows have the positions of the block itself.
    Each of them sees the draft before its position, and its own key (`attention_kernels.masks`). A
    step that drafts has these rows, too, and nobody reads what they compute.

    A canvas of a request that asks for verified drafts is one block. The scheduler plans the copy's
    rows behind it (`scheduling.families`), where the context has room. Where it has none, the
    canvas keeps its masks, and each causal step reveals the first of them: that is decoding in
    blocks of one token, too.
    """

    @property
    def verifying_causal(self) -> int:
        """Returns minus the block length: a row sees the draft before its position, and itself."""
        return -self.block_length

    def can_draft(self, batch: CanvasBatch) -> torch.Tensor:
        """Returns [n] bool: canvases that a copy of their block follows."""
        if batch.behind is None:
            return torch.zeros_like(batch.slots, dtype=torch.bool)
        return batch.behind > 0

    def begin_step(self, input_batch: InputBatch) -> None:
        """Sets `batch` to the step's canvases, without the copies behind them. Changes
        `input_batch` in place: the tokens of copies become masks, their positions become those of
        their block, and `logits_indices` of a draft that this step verifies become its copy's."""
        num_reqs, block_length = input_batch.num_reqs, self.block_length
        num_rows = np.diff(input_batch.cu_num_logits_np[: num_reqs + 1])
        is_verified = self.slot_settings.are_verified(input_batch.idx_mapping_np[:num_reqs])
        behind = np.where(is_verified & (num_rows > block_length), block_length, 0)
        if not behind.any():
            super().begin_step(input_batch)
            return
        lengths, device = num_rows - behind, self.device
        self.batch = batch = CanvasBatch.from_last_rows(
            input_batch, lengths, self.canvas_length, device, behind
        )
        copies = CanvasBatch.from_last_rows(input_batch, behind, block_length, device).tokens
        assert copies is not None and batch.tokens is not None and batch.behind is not None
        input_batch.input_ids[copies] = self.mask_id
        input_batch.positions[copies] -= block_length
        forward = torch.where(self.verifies(batch.slot_index), batch.behind, 0)
        input_batch.logits_indices = batch.tokens + batch.expand_to_rows(forward)

    def _cut_canvases(self, inputs: StepInputs, input_batch: InputBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases of which the scheduler ran only a part, or only a part of the
        copy behind it. Returns None if surely none is cut."""
        batch = inputs.batch
        is_verified = self.slot_settings.are_verified(batch.slots_np)
        if not is_verified.any():
            return super()._cut_canvases(inputs, input_batch)
        if not self.requests.joins_commits:  # the host may not know where canvases begin
            has_copy = async_tensor_h2d(is_verified, device=self.device)
            return batch.lengths_with_copies != self._whole_length(inputs.starts, has_copy)
        num_rows = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        lengths_np = num_rows[batch.requests_np]
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]  # exact, here
        is_cut = lengths_np != self._whole_length(ends - lengths_np, is_verified)
        return async_tensor_h2d(is_cut, device=self.device) if is_cut.any() else None

    def _whole_length(self, starts: torch.Tensor, has_copy: torch.Tensor) -> torch.Tensor:
        """Returns [n] int: how many rows the canvases at `starts` [n] have, with the copy that
        those in `has_copy` [n] bool have where there is room. Takes arrays of numpy, too."""
        unit = self.canvas_length + has_copy * (self.block_length - self.canvas_length)
        width, room = unit - starts % unit, self.requests.max_model_len - starts
        return (width + (has_copy & (width + unit <= room)) * unit).clip(max=room)


class ShiftedStep(DraftingStep, FirstTokenStep):
    """Draws the candidate of each position from the row before it: of models whose rows have the
    logits of the next token. So a causal forward verifies drafts of requests that ask for it.

    Before a canvas' first position, the row before is a known token of the same block, which each
    step computes anew beside the canvas. Where the canvas begins its block, it is the last row of
    the block before, and the first token was sampled when that block was prefilled, as by
    `FirstTokenStep`.
    """

    def begin_step(self, input_batch: InputBatch) -> None:
        """Moves the canvases' rows in `input_batch.logits_indices` back by one, so that the runner
        computes the logits of the row before each position. The first row of a block stays."""
        super().begin_step(input_batch)
        batch = self.batch
        if batch is None:
            return
        back = torch.zeros_like(input_batch.logits_indices)
        back[: batch.num_rows] = 1
        starts = input_batch.seq_lens[batch.request_index] - batch.lengths
        is_inside = starts % self.canvas_length != 0
        # A block's first row stands in for the one before it, which is not in this forward.
        back.index_copy_(0, batch.first_rows, is_inside.to(back.dtype))
        input_batch.logits_indices = input_batch.logits_indices - back

    def _keep_first_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of first tokens, for log-probabilities: a canvas that begins its block
        has no row for them."""
        # As the model computed them, whatever the server reports: `_denoise` puts them among a
        # forward's logits, and the step then processes them like those of other rows. What
        # `VerifiedStep` keeps is reported as it is.
        kept = logits.all_rows(in_process=False)
        self.requests.logprobs.keep_first_logits(rows.slots_np.tolist(), kept, is_new)

    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Denoises the canvases. First overwrites, in `source`, the first row of each canvas that
        begins its block with the logits kept for it: no row of this forward predicts it."""
        begins_block = inputs.starts % self.canvas_length == 0
        self.requests.logprobs.restore_first_logits(inputs.batch, source, begins_block)
        return super()._denoise(inputs, source)
