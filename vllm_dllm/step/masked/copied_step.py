"""Steps of models whose rows have the logits of their own positions, and see their whole block.

A row that verifies a position must see the tokens before it, and a mask in its own place. So a
draft is read with a second copy of its block behind it, all of it masks: keys and values of the
copy are in the places of the next block, but its rows have the positions of the block itself. Each
of them sees the draft before its position, and its own key (`attention_kernels.masks`). A step that
drafts has these rows, too, and nobody reads what they compute.

A canvas of a request that asks for verified drafts is one block. The scheduler plans the copy's
rows behind it (`scheduling.families`), where the context has room. Where it has none, the canvas
keeps its masks, and each causal step reveals the first of them: that is decoding in blocks of one
token, too.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import StepInputs
from vllm_dllm.step.masked.drafting_step import DraftingStep


class CopiedStep(DraftingStep):
    """Verifies drafts in a second copy of their block."""

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
