"""Canvases whose first token is known before their first step: what is before them foretells it.

The logits of a prompt's last row, and those of a finished block's when it is prefilled, are the
next token's. So a block's first step cannot share the forward of the
block before it: a block takes a forward more than steps, but for the last one, which is not
prefilled.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits import MaskedLogits
from vllm_dllm.step.masked_settings import MaskedStepSettings
from vllm_dllm.step.masked_step import MaskedStep


class SeededStep(MaskedStep):
    _ended: CanvasBatch | None = None  # the last rows of prefills that end in this step

    def begin(self, input_batch: InputBatch) -> None:
        """Has the runner make logits of the rows that foretell a canvas' first token, too; they
        come behind those of the canvases."""
        super().begin(input_batch)
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[: input_batch.num_reqs]  # exact, here
        has_ended = input_batch.is_prefilling_np & (ends == input_batch.prefill_len_np)
        if not self.family.is_causal:  # else the canvas' first tokens are the prompt's last
            has_ended &= ends % self.canvas_length == 0
        self._ended = None
        if has_ended.any():
            self._ended = ended = CanvasBatch.of_last_rows(
                input_batch, has_ended.astype(np.int64), self.canvas_length, self.device
            )
            rows = ended.first_rows if ended.tokens is None else ended.tokens
            input_batch.logits_indices = torch.cat((input_batch.logits_indices, rows))

    def start_canvases(self, source: torch.Tensor, input_batch: InputBatch) -> torch.Tensor:
        ended, self._ended = self._ended, None
        if ended is None:
            return source
        slots, idx, settings = self.slots, ended.slot_index, self.requests.settings.of(ended)
        assert isinstance(settings, MaskedStepSettings)
        num_others = len(source) - ended.num_canvases
        starts = input_batch.seq_lens[ended.request_index]
        logits = MaskedLogits(
            source[num_others:],
            ended,
            starts,
            slots.canvas.new_full((ended.num_canvases, 1), NO_TOKEN),
            self.soft_embedding,
            self.requests.filters,
            self.budget_bytes,
        )
        numbers = slots.read_numbers(idx)
        draw = noise.uniform(
            numbers.noise_key, starts[:, None], torch.zeros_like(numbers.noise_key), noise.INITIAL
        )
        temperature = settings.temperature[:, None]
        is_greedy = settings.is_greedy | self.family.is_shifted
        seeds = logits.draw(temperature, draw[:, 0], is_greedy).tokens
        slots.canvas[idx, 0] = seeds
        slots.revealed[idx, 0] = True
        self._seeded(ended, source[num_others:])
        return source[:num_others]

    def _seeded(self, ended: CanvasBatch, logits: torch.Tensor) -> None:
        """Of these requests' canvases, the first token is what `logits` [n, V] foretold."""


class CausalStep(SeededStep):
    """Known tokens see no canvas, and a canvas is as wide as a block."""

    num_recomputed = CanvasStep.num_recomputed
    _cut_canvases = CanvasStep._cut_canvases
