"""DiffusionSampler: gathers a step's inputs, calls the denoising policy, stores the result.

In vLLM's speculative-decoding accounting the canvas is a set of draft tokens. A denoise step
samples 0 tokens and rejects the whole canvas, so the KV position stays; a commit samples the whole
canvas and rejects nothing. The host never learns which of the two a request was in until the
output arrives, hence every request runs through both branches and keeps the one it is in.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import use_penalty

from vllm_dllm.canvas_batch import CanvasBatch
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.denoise.schedule import temperature
from vllm_dllm.denoise.step import CanvasState, StepOutcome, denoise_step
from vllm_dllm.logprobs import LogprobRequest, choose, concat, token_logprobs
from vllm_dllm.request import RequestOptions
from vllm_dllm.stopping import is_last_block, stop_tokens
from vllm_dllm.trace import CanvasTrace

if TYPE_CHECKING:
    from vllm_dllm.model_state import DiffusionModelState

logger = init_logger(__name__)

MASKED_LOGIT = -1e20
"""Stands for an excluded token: probability 0, yet finite after any temperature."""

TILE_BYTES = 1 << 30
"""Bounds the vocabulary-wide intermediates of a step, whatever the number of requests."""
TILE_BYTES_PER_LOGIT = 6 * 4  # fp32: scaled, log-probability, probability, cumulative, products


class DiffusionSampler:
    """Takes the place of vLLM's (Sampler, RejectionSampler) pair."""

    # The runner reads `output_bin_counts`; None means that no penalties are kept.
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(self, state: "DiffusionModelState", sampler: Any) -> None:
        self.state = state
        self.slots = state.slots
        self.config = state.denoise_config
        self.canvas_length = state.canvas_length
        self.vocab_size = state.model_config.get_vocab_size()
        self.embed_tokens = state.model.model.embed_tokens
        self.normalizer = state.model.model.normalizer

        self.req_states = sampler.req_states
        self.sampling_states = sampler.sampling_states  # top_k, top_p, seeds
        self._added: list[int] = []  # slots of requests that came since the last step
        self.report_logits = sampler.logprobs_mode in ("raw_logits", "processed_logits")

        self._widths = np.zeros(state.max_num_reqs, dtype=np.int64)  # host copy of slots.width
        # By slot; only requests that ask for one of these are in here.
        self._logprob_requests: dict[int, LogprobRequest] = {}
        self._logprobs: dict[int, LogprobsTensors] = {}  # of the slot's latest denoise step
        self._allowed: dict[int, torch.Tensor] = {}  # [V] bool, True = may be sampled
        self._read_only: set[int] = set()
        trace_path = state.extension_config.trace_path
        self.trace = CanvasTrace(trace_path) if trace_path else None

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        if use_penalty(sampling_params):
            logger.warning_once(
                "Diffusion models apply no frequency, presence or repetition penalty."
            )
        device = self.slots.canvas.device
        options = RequestOptions.from_sampling_params(sampling_params)
        self.sampling_states.add_request(req_idx, sampling_params)
        self._added.append(req_idx)
        num_steps = self.config.max_denoising_steps
        if options.max_steps is not None:
            num_steps = min(options.max_steps, num_steps)
        width = options.canvas_length or self.canvas_length
        self._widths[req_idx] = width
        seed = int(self.sampling_states.seeds.np[req_idx])
        self.slots.reset(req_idx, seed, num_steps, width)
        # After a preemption the prefill holds the blocks committed so far, too.
        prompt_len = int(self.req_states.prompt_len.np[req_idx])
        is_resumed = self.req_states.prefill_len.np[req_idx] > prompt_len
        if options.first_canvas is not None and not is_resumed:
            self.slots.set_first_canvas(req_idx, options.first_canvas, options.pinned)
        if options.read_only:
            self.slots.read_only[req_idx].fill_(True)
        max_tokens = sampling_params.max_tokens
        end = self.state.max_model_len if max_tokens is None else prompt_len + max_tokens
        self.slots.end[req_idx].fill_(min(end, self.state.max_model_len))
        self.slots.stop_tokens[req_idx] = async_tensor_h2d(
            np.array(stop_tokens(sampling_params)), device=device
        )
        rule = options.window_rule or self.state.extension_config.window_rule
        self.slots.symmetric_window[req_idx].fill_(int(rule == "symmetric"))

        self._forget(req_idx)
        if options.read_only:
            self._read_only.add(req_idx)
        if options.allowed_token_ids is not None:
            allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
            allowed[list(options.allowed_token_ids)] = True
            self._allowed[req_idx] = allowed.to(device)
        num_logprobs = sampling_params.logprobs
        token_ids = tuple(sampling_params.logprob_token_ids or ())
        if num_logprobs is not None or token_ids:
            if num_logprobs == -1:
                num_logprobs = self.vocab_size
            self._logprob_requests[req_idx] = LogprobRequest(
                num_logprobs or 0,
                async_tensor_h2d(np.array(token_ids, dtype=np.int64), device=device),
            )

    def _forget(self, slot: int) -> None:
        """Drops what an earlier request left under this slot."""
        self._logprob_requests.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._allowed.pop(slot, None)
        self._read_only.discard(slot)

    def apply_staged_writes(self) -> None:
        if self._added:
            self.sampling_states.apply_staged_writes()
            self._start_canvases(np.array(self._added, dtype=np.int64))
            self._added.clear()

    # --- a step -----------------------------------------------------------------------------

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, V] fp32, soft-capped
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Advances every request of the batch by one step."""
        num_reqs = input_batch.num_reqs
        sampled = torch.zeros(num_reqs, self.canvas_length, dtype=torch.int32, device=logits.device)
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=logits.device)
        num_rejected = torch.zeros_like(num_sampled)
        logprobs = None
        if input_batch.num_draft_tokens > 0:
            batch = self.state.canvas_batch
            assert batch is not None, "prepare_inputs runs before the sampler"
            best_guess, emitted, logprobs = self._advance_canvases(logits, batch, input_batch)
            canvas = self.slots.canvas[batch.slots]
            self.req_states.draft_tokens[batch.slots, : self.canvas_length] = canvas
            sampled[batch.requests] = best_guess.int()
            num_sampled[batch.requests] = emitted.int()
            num_rejected[batch.requests] = (batch.lengths - emitted).int()
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _cut_canvases(self, batch: CanvasBatch, starts: torch.Tensor) -> torch.Tensor | None:
        """[n] bool: canvases of which the scheduler ran only a part, for lack of token budget.

        Such a step says nothing about the canvas: it is taken back, and the whole canvas is
        scheduled again. A canvas that ends where the context ends is not cut. None: surely none.
        """
        if (batch.lengths_np == self._widths[batch.slots_np]).all():
            return None
        room = self.state.max_model_len - starts
        return batch.lengths < torch.minimum(self.slots.width[batch.slots], room)

    def _start_canvases(self, slots_np: np.ndarray) -> None:
        """Gives the requests that have just come to the slots [n] their first canvas, which begins
        where their prefill ends."""
        device = self.slots.canvas.device
        idx = async_tensor_h2d(slots_np, device=device)
        starts = self.req_states.prefill_len.np[slots_np].astype(np.int64)
        random = self._fresh_canvas(self.slots.seeds[idx], async_tensor_h2d(starts, device=device))
        has_first = self.slots.has_first_canvas[idx, None]
        canvas = torch.where(has_first, self.slots.first_canvas[idx], random)
        self.slots.canvas[idx] = canvas
        self.req_states.draft_tokens[idx, : self.canvas_length] = canvas

    def _advance_canvases(
        self, logits: torch.Tensor, batch: CanvasBatch, input_batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobsTensors | None]:
        """Denoises or commits each canvas. Returns best guesses [n, C], tokens emitted [n] and
        the log-probabilities of the emitted tokens."""
        slots, idx = self.slots, batch.slots
        block_ends = input_batch.seq_lens[batch.requests]
        starts = block_ends - batch.lengths
        seeds, steps_done = slots.seeds[idx], slots.steps_done[idx]
        num_steps, pinned = slots.num_steps[idx], slots.pinned[idx]
        denoising = slots.is_committing[idx] == 0
        cut = self._cut_canvases(batch, starts)
        earlier = None if cut is None else slots.progress(idx)

        logits = self._filter(logits, batch)
        step_temperature = temperature(steps_done, num_steps, self.config.t_min, self.config.t_max)
        row_temperature = batch.by_row(step_temperature)[:, None]
        drawn = noise.step_noise(
            seeds,
            self._positions(starts),
            steps_done,
            self._positions(block_ends),
            self.vocab_size,
        )
        by_row, soft_rows = self._read_rows(logits, row_temperature, batch.flatten(drawn.candidate))
        stats = RowStats(*(batch.unflatten(column) for column in by_row))
        outcome = denoise_step(
            stats,
            batch.valid,
            CanvasState(slots.history[idx], steps_done, num_steps),
            drawn.renoise,
            self.config,
        )

        finished = outcome.finished & denoising
        best_guess = torch.where(denoising[:, None], stats.best_guess, slots.best_guess[idx])
        emitted_uncommitted = slots.read_only[idx]
        if not self.state.extension_config.commit_last_block:
            emitted_uncommitted = emitted_uncommitted | is_last_block(
                best_guess, batch.valid, block_ends, slots.end[idx], slots.stop_tokens[idx]
            )
        emitted_uncommitted = finished & emitted_uncommitted
        emitted = torch.where(denoising & ~emitted_uncommitted, 0, batch.lengths)

        keeps_soft = (denoising & ~finished)[:, None] & ~pinned
        soft = batch.unflatten(soft_rows)
        slots.soft_embeds[idx] = torch.where(keeps_soft[..., None], soft, 0.0)

        canvas = torch.where(pinned, slots.first_canvas[idx], outcome.canvas)
        canvas = torch.where(finished[:, None], best_guess, canvas)
        canvas = torch.where(denoising[:, None], canvas, drawn.next_canvas)
        self._store(batch, denoising, outcome, canvas, best_guess)
        slots.is_committing[idx] = (finished & ~emitted_uncommitted).int()

        if cut is not None and earlier is not None:
            slots.take_back(idx, cut, earlier)
            emitted, denoising = torch.where(cut, 0, emitted), denoising & ~cut

        if self.trace is not None:
            self.trace.record(input_batch, batch, stats, outcome, canvas, denoising, finished)
        logprobs = self._step_logprobs(
            logits, row_temperature, by_row, batch, input_batch, emitted_uncommitted, cut
        )
        return best_guess, emitted, logprobs

    def _read_rows(
        self,
        logits: torch.Tensor,  # [rows, V] fp32
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        draw: torch.Tensor,  # [rows] float64
    ) -> tuple[RowStats, torch.Tensor]:
        """Statistics [rows] and expected embeddings [rows, H] of the scaled logits, computed tile
        by tile so that the vocabulary-wide intermediates stay within `TILE_BYTES`."""
        tile_rows = max(1, TILE_BYTES // (logits.shape[-1] * TILE_BYTES_PER_LOGIT))
        tiles = []
        for start in range(0, len(logits), tile_rows):
            rows = slice(start, start + tile_rows)
            scaled = logits[rows] / row_temperature[rows]
            probs = scaled.softmax(dim=-1)
            tiles.append(
                (*row_stats(scaled, probs, draw[rows]), self._expected_embeds(scaled, probs))
            )
        best_guess, candidate, entropy, soft = (
            columns[0] if len(tiles) == 1 else torch.cat(columns)
            for columns in zip(*tiles, strict=True)
        )
        return RowStats(best_guess, candidate, entropy), soft

    def _store(
        self,
        batch: CanvasBatch,
        denoising: torch.Tensor,  # [n] bool; the others commit and start their next block
        outcome: StepOutcome,
        canvas: torch.Tensor,  # [n, C], the next forward's input
        best_guess: torch.Tensor,  # [n, C]
    ) -> None:
        slots, idx = self.slots, batch.slots
        slots.canvas[idx] = canvas
        slots.best_guess[idx] = best_guess
        slots.history[idx] = torch.where(denoising[:, None, None], outcome.state.history, NO_TOKEN)
        slots.steps_done[idx] = torch.where(denoising, outcome.state.steps_done, 0)
        # The caller's canvas and its pins belong to the first block alone.
        slots.pinned[idx] &= denoising[:, None]

    def _fresh_canvas(self, seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Random tokens [n, C] for canvases that begin at absolute positions `starts` [n]."""
        return noise.uniform_tokens(
            seeds,
            self._positions(starts),
            torch.zeros_like(starts),
            noise.INITIAL,
            self.vocab_size,
        )

    def _positions(self, starts: torch.Tensor) -> torch.Tensor:
        """Absolute positions [n, C] of canvases that begin at `starts` [n]."""
        return starts[:, None] + torch.arange(self.canvas_length, device=starts.device)

    def _filter(self, logits: torch.Tensor, batch: CanvasBatch) -> torch.Tensor:
        """Excludes tokens by top_k, top_p and the allowed sets of constrained requests."""
        if not self._allowed.keys().isdisjoint(batch.slots_np.tolist()):
            logits = logits.clone()
            ends = np.cumsum(batch.lengths_np).tolist()
            for slot, end, length in zip(
                batch.slots_np.tolist(), ends, batch.lengths_np.tolist(), strict=True
            ):
                if (allowed := self._allowed.get(slot)) is not None:
                    logits[end - length : end].masked_fill_(~allowed, MASKED_LOGIT)
        return self.sampling_states.apply_top_k_top_p(
            logits, batch.by_row(batch.slots), batch.slots_np
        )

    def _expected_embeds(self, scaled: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """`softmax(scaled) @ E * sqrt(H)` [rows, H], the next step's self-conditioning input.

        The reference rounds the logits to the model's type, takes the softmax in fp32 and rounds
        again. The vocabulary may be sharded over the tensor-parallel ranks.
        """
        weight = self.embed_tokens.weight
        if weight.dtype != scaled.dtype:
            probs = scaled.to(weight.dtype).softmax(dim=-1, dtype=torch.float32)
        shard = self.embed_tokens.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        expected = torch.matmul(probs[:, first:end].to(weight.dtype), weight[: end - first])
        group = get_tp_group()
        if group.world_size > 1:
            expected = group.all_reduce(expected)
        return expected * self.normalizer

    def _step_logprobs(
        self,
        logits: torch.Tensor,  # [rows, V], at temperature 1
        row_temperature: torch.Tensor,  # [rows, 1]
        stats: RowStats,  # fields [rows]
        batch: CanvasBatch,
        input_batch: InputBatch,
        emitted_uncommitted: torch.Tensor,  # [n] bool, blocks this step both decides and emits
        cut: torch.Tensor | None,  # [n] bool, steps that were taken back
    ) -> LogprobsTensors | None:
        """Scores a commit of this step would report, and keeps this step's for the next one."""
        if self._logprob_requests.keys().isdisjoint(batch.slots_np.tolist()):
            return None
        taken_back = [False] * batch.num_canvases if cut is None else cut.tolist()
        parts: list[LogprobsTensors] = []
        first_rows = [0] * input_batch.num_reqs
        num_rows, end = 0, 0
        for i, (request, slot, length) in enumerate(
            zip(
                batch.requests_np.tolist(),
                batch.slots_np.tolist(),
                batch.lengths_np.tolist(),
                strict=True,
            )
        ):
            end += length
            wanted = self._logprob_requests.get(slot)
            if wanted is None or taken_back[i]:
                continue
            read_only = slot in self._read_only
            rows = slice(end - length, end)
            # A read-only request asks what the model thinks, not what the schedule makes of it.
            current = token_logprobs(
                logits[rows],
                None if read_only else row_temperature[rows],
                stats.best_guess[rows],
                wanted,
                self.report_logits,
            )
            reported = current
            if not read_only and slot in self._logprobs:
                reported = choose(emitted_uncommitted[i], current, self._logprobs[slot])
            self._logprobs[slot] = current
            first_rows[request] = num_rows
            num_rows += len(reported.logprobs)
            parts.append(reported)
        return concat(parts, first_rows) if parts else None
