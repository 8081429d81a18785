"""DiffusionSampler: gathers a step's inputs, calls the denoising policy, stores the result.

In vLLM's speculative-decoding accounting the canvas is a set of draft tokens. A denoise step
samples 0 tokens and rejects the whole canvas, so the KV position stays; a commit samples the whole
canvas and rejects nothing, and so does the step that finishes a request's last canvas. The host
never learns which of the two a request was in until the output arrives, hence every request runs
through both branches and keeps the one it is in.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
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
from vllm_dllm.denoise.step import CanvasState, denoise_step
from vllm_dllm.logprobs import LogprobRequest, choose, concat, token_logprobs
from vllm_dllm.request import RequestOptions
from vllm_dllm.stopping import (
    EVERY_BLOCK,
    MAX_STOP_TOKENS,
    NEVER,
    NO_BLOCK,
    is_last_block,
    spares_last_commit,
    stop_tokens,
)
from vllm_dllm.trace import CanvasTrace

if TYPE_CHECKING:
    from vllm_dllm.model_state import DiffusionModelState

logger = init_logger(__name__)

MASKED_LOGIT = -1e20
"""Stands for an excluded token: its probability is 0, its share of the entropy is not NaN."""

TILE_BYTES = 1 << 30
"""Bounds the vocabulary-wide intermediates of a step, whatever the number of requests."""
TILE_BYTES_PER_LOGIT = 5 * 4  # fp32: logit, scaled, log-probability, probability, cumulative


class DiffusionSampler:
    """Takes the place of vLLM's (Sampler, RejectionSampler) pair."""

    # The runner reads `output_bin_counts`; None means that no penalties are kept.
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(self, state: "DiffusionModelState", sampler: Any) -> None:
        self.state = state
        self.config = state.denoise_config
        self.canvas_length = state.canvas_length
        self.vocab_size = state.model_config.get_vocab_size()
        self.model = state.model

        self.req_states = sampler.req_states
        self.slots = state.allocate_slots(self.req_states.draft_tokens)
        self._offsets = torch.arange(self.canvas_length, device=self.slots.canvas.device)
        self.sampling_states = sampler.sampling_states  # top_k, top_p, seeds
        self._spares_last_commit = spares_last_commit(state.vllm_config)
        self._added: list[int] = []  # slots of requests that came since the last step
        self.report_logits = sampler.logprobs_mode in ("raw_logits", "processed_logits")

        self._widths = np.zeros(state.max_num_reqs, dtype=np.int64)  # host copy of slots.width
        self._num_stops = np.zeros(state.max_num_reqs, dtype=np.int64)  # of slots.stop_tokens
        # By slot; only requests that ask for one of these are in here.
        self._logprob_requests: dict[int, LogprobRequest] = {}
        self._logprobs: dict[int, LogprobsTensors] = {}  # of the slot's latest denoise step
        self._allowed: dict[int, torch.Tensor] = {}  # [V] bool, True = may be sampled
        self._first_canvases: dict[int, torch.Tensor] = {}  # [width] int64, the caller's
        self._read_only: set[int] = set()
        self._pinned: set[int] = set()
        self._top_k_top_p: set[int] = set()
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
        prompt_len = int(self.req_states.prompt_len.np[req_idx])
        end, stops = self._last_block(sampling_params, options, prompt_len)
        self.slots.reset(
            req_idx,
            seed=int(self.sampling_states.seeds.np[req_idx]),
            num_steps=num_steps,
            end=end,
            stop_tokens=stops + [NEVER] * (MAX_STOP_TOKENS - len(stops)),
            width=width,
        )
        self._num_stops[req_idx] = len(stops)
        rule = options.window_rule or self.state.extension_config.window_rule
        self.slots.symmetric_window[req_idx].fill_(int(rule == "symmetric"))

        self._forget(req_idx)
        # After a preemption the prefill holds the blocks committed so far, too.
        is_resumed = self.req_states.prefill_len.np[req_idx] > prompt_len
        if options.first_canvas is not None and not is_resumed:
            self._first_canvases[req_idx] = torch.tensor(options.first_canvas)
            if options.pinned:
                self.slots.pin(req_idx, options.first_canvas, options.pinned)
                self._pinned.add(req_idx)
        if options.read_only:
            self._read_only.add(req_idx)
        if sampling_params.top_k > 0 or sampling_params.top_p < 1.0:
            self._top_k_top_p.add(req_idx)
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

    def _last_block(
        self, params: SamplingParams, options: RequestOptions, prompt_len: int
    ) -> tuple[int, list[int]]:
        """The position and the tokens by which the device tells a request's last block, which the
        step that finishes it emits."""
        if options.read_only:
            return EVERY_BLOCK, []
        if not self._spares_last_commit:
            return NO_BLOCK, []
        max_tokens = params.max_tokens
        end = self.state.max_model_len if max_tokens is None else prompt_len + max_tokens
        return min(end, self.state.max_model_len), stop_tokens(params)

    def _forget(self, slot: int) -> None:
        """Drops what an earlier request left under this slot."""
        self._logprob_requests.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._allowed.pop(slot, None)
        self._first_canvases.pop(slot, None)
        for slots in (self._read_only, self._pinned, self._top_k_top_p):
            slots.discard(slot)

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
        num_reqs, device = input_batch.num_reqs, logits.device
        if input_batch.num_draft_tokens == 0:
            none = torch.zeros(num_reqs, dtype=torch.int32, device=device)
            sampled = none[:, None].expand(-1, self.canvas_length)
            return _output(sampled, none, none, None)
        batch = self.state.canvas_batch
        assert batch is not None, "prepare_inputs runs before the sampler"
        best_guess, emitted, logprobs = self._advance_canvases(logits, batch, input_batch)
        rejected = batch.lengths - emitted
        if batch.num_canvases == num_reqs:
            return _output(best_guess, emitted, rejected, logprobs)

        # The others are in their prefill: they sample nothing and reject nothing.
        def spread(column: torch.Tensor) -> torch.Tensor:
            everyone = column.new_zeros(num_reqs, *column.shape[1:])
            return everyone.index_copy_(0, batch.requests, column)

        return _output(spread(best_guess), spread(emitted), spread(rejected), logprobs)

    def _cut_canvases(self, batch: CanvasBatch, starts: torch.Tensor) -> torch.Tensor | None:
        """[n] bool: canvases of which the scheduler ran only a part, for lack of token budget.

        Such a step says nothing about the canvas: it is taken back, and the whole canvas is
        scheduled again. A canvas that ends where the context ends is not cut. None: surely none.
        """
        if batch.cells is None or (batch.lengths_np == self._widths[batch.slots_np]).all():
            return None
        room = self.state.max_model_len - starts
        return batch.lengths < torch.minimum(self.slots.width[batch.slots], room)

    def _start_canvases(self, slots_np: np.ndarray) -> None:
        """Gives the requests that have just come to the slots [n] their first canvas, which begins
        where their prefill ends."""
        device = self.slots.canvas.device
        idx = async_tensor_h2d(slots_np, device=device)
        starts = self.req_states.prefill_len.np[slots_np].astype(np.int64)
        self.slots.canvas[idx] = noise.uniform_tokens(
            self.slots.read_numbers(idx).noise_key,
            async_tensor_h2d(starts, device=device)[:, None] + self._offsets,
            torch.zeros_like(idx),
            noise.INITIAL,
            self.vocab_size,
        )
        for slot in slots_np.tolist():
            if (first := self._first_canvases.pop(slot, None)) is not None:
                self.slots.canvas[slot, : len(first)] = async_tensor_h2d(first, device=device)

    def _advance_canvases(
        self, logits: torch.Tensor, batch: CanvasBatch, input_batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobsTensors | None]:
        """Denoises or commits each canvas. Returns best guesses [n, C], tokens emitted [n] and
        the log-probabilities of the emitted tokens."""
        slots, idx = self.slots, batch.slot_index
        numbers, tokens = slots.read_numbers(idx), slots.read_tokens(idx)
        block_ends = input_batch.seq_lens[batch.request_index]
        starts = block_ends - batch.lengths
        committing = numbers.is_committing == 1
        cut = self._cut_canvases(batch, starts)
        earlier = None if cut is None else slots.progress(idx)

        logits = self._filter(logits, batch)
        step_temperature = temperature(
            numbers.steps_done, numbers.num_steps, self.config.t_min, self.config.t_max
        )
        row_temperature = batch.by_row(step_temperature)[:, None]
        drawn = noise.step_noise(
            numbers.noise_key,
            starts,
            batch.lengths,
            numbers.steps_done,
            self.canvas_length,
            self.vocab_size,
        )
        by_row, soft_rows = self._read_rows(logits, row_temperature, batch.flatten(drawn.candidate))
        stats = RowStats(*(batch.unflatten(column) for column in by_row))
        outcome = denoise_step(
            stats,
            batch.valid,
            CanvasState(tokens.history, numbers.steps_done, numbers.num_steps),
            drawn.renoise,
            self.config,
        )

        denoised = ~committing
        finished = outcome.finished & denoised
        committed = committing[:, None]
        best_guess = torch.where(committed, tokens.best_guess, stats.best_guess)
        num_stops = self._num_stops[batch.slots_np].max()
        at_once = finished & is_last_block(
            best_guess, batch.valid, block_ends, numbers.end, slots.stop_tokens[idx][:, :num_stops]
        )
        emitted = batch.lengths * (committing | at_once)

        canvas = torch.where(finished[:, None], best_guess, outcome.canvas)
        # A commit reads none, and the canvas after it starts with none.
        drops_soft = committed[..., None]
        if not self._pinned.isdisjoint(batch.slots_np.tolist()):
            # The caller's canvas and its pins belong to the first block alone.
            pinned = slots.pinned[idx] & ~committed
            slots.pinned[idx] = pinned
            canvas = torch.where(pinned & ~finished[:, None], tokens.first_canvas, canvas)
            drops_soft = drops_soft | pinned[..., None]
        slots.canvas[idx] = torch.where(committed, drawn.next_canvas, canvas)
        slots.soft_embeds[idx] = batch.unflatten(soft_rows).masked_fill_(drops_soft, 0.0)
        slots.write(
            idx,
            best_guess,
            outcome.state.history.masked_fill(committed[..., None], NO_TOKEN),
            outcome.state.steps_done.masked_fill(committing, 0),
            finished & ~at_once,
        )

        if cut is not None and earlier is not None:
            slots.take_back(idx, cut, earlier)
            emitted, denoised = torch.where(cut, 0, emitted), denoised & ~cut

        if self.trace is not None:
            next_canvas = slots.canvas[idx]
            self.trace.record(input_batch, batch, stats, outcome, next_canvas, denoised, finished)
        logprobs = self._step_logprobs(
            logits, row_temperature, by_row, batch, input_batch, at_once, cut
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
            stats, probs = row_stats(scaled, draw[rows])
            tiles.append((*stats, self.model.soft_embeddings(scaled, probs)))
        best_guess, candidate, entropy, soft = (
            columns[0] if len(tiles) == 1 else torch.cat(columns)
            for columns in zip(*tiles, strict=True)
        )
        return RowStats(best_guess, candidate, entropy), soft

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
        if self._top_k_top_p.isdisjoint(batch.slots_np.tolist()):
            return logits
        logits = self.sampling_states.apply_top_k_top_p(
            logits, batch.by_row(batch.slots), batch.slots_np
        )
        return logits.clamp(min=MASKED_LOGIT)  # from -inf

    def _step_logprobs(
        self,
        logits: torch.Tensor,  # [rows, V], at temperature 1
        row_temperature: torch.Tensor,  # [rows, 1]
        stats: RowStats,  # fields [rows]
        batch: CanvasBatch,
        input_batch: InputBatch,
        at_once: torch.Tensor,  # [n] bool, blocks this step both decides and emits
        cut: torch.Tensor | None,  # [n] bool, steps that were taken back
    ) -> LogprobsTensors | None:
        """Scores of the blocks this step may emit: its own, or, if it commits, those of the step
        before, which are kept for it."""
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
                reported = choose(at_once[i], current, self._logprobs[slot])
            self._logprobs[slot] = current
            first_rows[request] = num_rows
            num_rows += len(reported.logprobs)
            parts.append(reported)
        return concat(parts, first_rows) if parts else None


def _output(
    sampled: torch.Tensor,  # [num_reqs, C] int
    num_sampled: torch.Tensor,  # [num_reqs] int
    num_rejected: torch.Tensor,  # [num_reqs] int
    logprobs: LogprobsTensors | None,
) -> SamplerOutput:
    return SamplerOutput(
        sampled_token_ids=sampled.int(),
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=num_sampled.int(),
        num_rejected=num_rejected.int(),
    )
