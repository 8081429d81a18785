"""Steps of models whose rows have the logits of the next token.

The candidate of a position comes from the row before it. Before a canvas' first position, that is a
known token of the same block, which each step computes anew beside the canvas. Where the canvas
begins its block, it is the last row of the block before, and the first token was sampled when that
block was prefilled (`seeded_step`).

Since rows predict the next token, a causal forward verifies a block that is filled with guesses
(`drafting_step`).
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, StepInputs
from vllm_dllm.step.logits.masked_logits import MaskedLogits
from vllm_dllm.step.masked.drafting_step import DraftingStep
from vllm_dllm.step.masked.seeded_step import SeededStep


class ShiftedStep(DraftingStep, SeededStep):
    """Draws the candidate of each position from the row before it, and so verifies drafts of
    requests that ask for it."""

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

    def _keep_seed_logits(
        self, rows: CanvasBatch, logits: MaskedLogits, is_new: torch.Tensor | None
    ) -> None:
        """Keeps the logits of first tokens, for log-probabilities: a canvas that begins its block
        has no row for them."""
        # As the model computed them, whatever the server reports: `_denoise` puts them among a
        # forward's logits, and the step then processes them like those of other rows. What
        # `VerifiedStep` keeps is reported as it is.
        kept = logits.all_rows(in_process=False)
        self.requests.logprobs.keep_seed_logits(rows.slots_np.tolist(), kept, is_new)

    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Denoises the canvases. First overwrites, in `source`, the first row of each canvas that
        begins its block with the logits kept for it, because no row of this forward predicts that
        position."""
        begins_block = inputs.starts % self.canvas_length == 0
        self.requests.logprobs.restore_seed_logits(inputs.batch, source, begins_block)
        return super()._denoise(inputs, source)
