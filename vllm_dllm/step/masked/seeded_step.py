"""Steps of canvases whose first token, the seed, is sampled before their first step.

The logits of a prompt's last row, and of a finished block's last row when it is prefilled, are the
next token's. So a block's first step cannot share the forward that prefills the block before it:
each block but the last takes one forward more than it has steps.
"""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import StepInputs, StepResult
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.masked_logits import MaskedLogits, RowDraws, RowNoise
from vllm_dllm.step.masked.masked_step import MaskedStep


class SeededStep(MaskedStep):
    """Samples the first token of each canvas before its first step, from the row before the
    canvas."""

    _ended: CanvasBatch | None = None  # the last rows of prefills that end in this step
    # The last rows of k canvases, any of which this step may commit, with asynchronous scheduling.
    _last: CanvasBatch | None = None
    _last_canvases: torch.Tensor | None = None  # [k] int64, indices of these canvases; None: all

    def begin_step(self, input_batch: InputBatch) -> None:
        """Appends the rows that predict canvases' first tokens to `input_batch.logits_indices`,
        behind the canvases' own rows. These are the last rows of prefills that end, and of canvases
        that this step may commit."""
        super().begin_step(input_batch)
        # Exact in a prefill.
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[: input_batch.num_reqs]
        has_ended = input_batch.is_prefilling_np & (ends == input_batch.prefill_len_np)
        if not self.family.is_causal:  # else the canvas' first tokens are the prompt's last
            has_ended &= ends % self.canvas_length == 0
        self._ended = self._append_last_rows(input_batch, has_ended)
        self._last = None
        if self.batch is not None and not self.requests.joins_commits:
            has_canvas, are_seeded = np.zeros_like(has_ended), self._predicts_next_seed(self.batch)
            has_canvas[self.batch.requests_np] = are_seeded
            self._last = self._append_last_rows(input_batch, has_canvas)
            self._last_canvases = None
            if not are_seeded.all():
                places = np.flatnonzero(are_seeded)
                self._last_canvases = async_tensor_h2d(places, device=self.device)

    def _predicts_next_seed(self, batch: CanvasBatch) -> np.ndarray:
        """Returns [n] bool: canvases whose commit predicts the next canvas' first token."""
        return np.ones(batch.num_canvases, dtype=bool)

    def _append_last_rows(
        self,
        input_batch: InputBatch,
        chosen: np.ndarray,  # [num_reqs] bool
    ) -> CanvasBatch | None:
        """Appends the last row of each chosen request to `input_batch.logits_indices`, so that the
        runner computes its logits. Returns a batch of these rows, or None if no request is
        chosen."""
        if not chosen.any():
            return None
        last = CanvasBatch.from_last_rows(
            input_batch, chosen.astype(np.int64), self.canvas_length, self.device
        )
        rows = last.first_rows if last.tokens is None else last.tokens
        input_batch.logits_indices = torch.cat((input_batch.logits_indices, rows))
        return last

    def start_canvases(
        self, batch: CanvasBatch | None, source: torch.Tensor, input_batch: InputBatch
    ) -> None:
        """Writes the first tokens of canvases whose prompt's prefill ends in this step into their
        slots."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        first_row = 0 if batch is None else batch.num_rows
        logits = source[first_row : first_row + ended.num_canvases]
        starts, idx = input_batch.seq_lens[ended.request_index], ended.slot_index
        self.slots.canvas[idx, 0] = self._sample_seed_tokens(ended, logits, starts, None)
        self.slots.revealed[idx, 0] = True

    def _denoise_and_settle(
        self, inputs: StepInputs, source: torch.Tensor, input_batch: InputBatch
    ) -> StepResult:
        """Denoises and settles the canvases, whose rows come first in `source`. Then samples the
        first token of each canvas that follows a block committed by this step."""
        result = super()._denoise_and_settle(inputs, source[: inputs.batch.num_rows], input_batch)
        last, self._last = self._last, None
        if last is not None:
            self._seed_next_canvases(inputs, result, last, source[-last.num_canvases :])
        return result

    def _seed_next_canvases(
        self,
        inputs: StepInputs,
        result: StepResult,
        last: CanvasBatch,
        logits: torch.Tensor,  # [k, V] fp32, of the rows `last`
    ) -> None:
        """Writes the first token of each canvas that follows a block committed by this step. The
        commit is also the block's prefill, so its last row predicts that token."""
        slots, idx = self.slots, last.slot_index
        is_new, ends = result.emitted > 0, inputs.block_ends
        if self._last_canvases is not None:
            is_new, ends = is_new[self._last_canvases], ends[self._last_canvases]
        self.requests.filters.write_emitted_tokens(
            inputs.batch, inputs.starts, result.best_guess, result.emitted
        )
        seeds = self._sample_seed_tokens(last, logits, ends, is_new)
        slots.canvas[idx, 0] = torch.where(is_new, seeds, slots.canvas[idx, 0])
        slots.revealed[idx, 0] = slots.revealed[idx, 0] | is_new

    def _sample_seed_tokens(
        self,
        rows: CanvasBatch,  # of n requests, the row before each one's canvas
        logits: torch.Tensor,  # [n, V] fp32
        starts: torch.Tensor,  # [n] int64, where their canvases begin
        is_new: torch.Tensor | None,  # [n] bool, canvases that do begin; None: all
    ) -> torch.Tensor:
        """Returns [n] int64: the first token of each canvas, sampled from the row before it; always
        the most probable one in shifted families (`Family.is_shifted`). For requests that ask for
        log-probabilities, keeps the tokens' scores and logits where `is_new`. Waits for the device
        if a request has a grammar."""
        slots, settings = self.slots, self.slot_settings.for_batch(rows)
        guesses = slots.canvas.new_full((rows.num_canvases, 1), NO_TOKEN)
        ruled = MaskedLogits(logits, RuleContext(rows, starts, guesses), self.logit_tools)
        key = slots.read_numbers(rows.slot_index).noise_key
        draw = noise.uniform(key, starts[:, None], torch.zeros_like(key), noise.INITIAL)
        is_greedy = settings.is_greedy | self.family.is_shifted
        temperature = settings.temperature[:, None]
        draws = RowDraws(
            ruled, RowNoise(rows, self.logit_tools, temperature, draw[:, 0], is_greedy)
        )
        tokens = draws.draw_all().tokens
        tokens = self.grammars.legal_first_tokens(rows, starts, is_new, draws, tokens)
        self.requests.logprobs.keep_first_scores(rows, ruled, temperature, tokens, is_new)
        self._keep_seed_logits(rows, ruled, is_new)
        return tokens

    def _keep_seed_logits(
        self,
        rows: CanvasBatch,
        logits: MaskedLogits,  # of n rows
        is_new: torch.Tensor | None,  # [n] bool; None: all are
    ) -> None:
        """Hook: keeps the logits of first tokens where `is_new`, for subclasses whose later steps
        cannot compute them again. Does nothing in this class, where each first token has a row of
        its own."""
