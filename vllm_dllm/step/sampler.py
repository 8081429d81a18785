"""DiffusionSampler: gathers a step's inputs, calls the denoising policy, stores the result.

In vLLM's speculative-decoding accounting the canvas is a set of draft tokens. A denoise step
samples 0 tokens and rejects the whole canvas, so the KV position stays. A finished canvas is
sampled at once if it is the last, or if the next step commits it beside the next canvas
(`spared_forwards.joins_commits`); else it has a commit, which samples the whole canvas and rejects
nothing. The host never learns which of them a request was in until the output arrives, hence every
request runs through all branches and keeps the one it is in.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dllm.compat.prompt_privacy import keep_prompts_private
from vllm_dllm.compat.runner import prefill_emitted_tokens, score_prompts_by
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import AnswerOnly, CanvasState, denoise_step
from vllm_dllm.denoise.temperature import temperature
from vllm_dllm.requests.ends import (
    EVERY_BLOCK,
    MAX_STOP_TOKENS,
    NEVER,
    NO_END,
    is_last_block,
    stop_tokens,
)
from vllm_dllm.requests.options import RequestOptions, fitted_width
from vllm_dllm.scheduling.spared_forwards import spares_last_commit
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.filters import LogitFilters
from vllm_dllm.step.logits import CanvasLogits, StreamedLogits, WholeLogits, step_bytes, whole_rows
from vllm_dllm.step.logprobs import StepLogprobs
from vllm_dllm.step.settings import Policies, revealing
from vllm_dllm.step.soft_embedding import SoftEmbedding
from vllm_dllm.step.trace import CanvasTrace

if TYPE_CHECKING:
    from vllm_dllm.step.model_state import DiffusionModelState


class DiffusionSampler:
    """Takes the place of vLLM's (Sampler, RejectionSampler) pair."""

    # The runner reads `output_bin_counts`; None: `LogitFilters` counts for those who ask.
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
        self.prefills_emitted_tokens = False  # until a request says what the scheduler does
        prefill_emitted_tokens()
        keep_prompts_private()
        self._added: list[int] = []  # slots of requests that came since the last step
        self.policies = Policies(
            self.config, state.max_num_reqs, self.canvas_length, self.slots.canvas.device
        )
        extension = state.extension_config
        self._budget_bytes = extension.sampling_memory_mib << 20
        score_prompts_by(whole_rows(self.vocab_size, self._budget_bytes))
        self.soft_embedding = SoftEmbedding(
            self.model, extension.self_conditioning_tolerance, extension.self_conditioning_top_k
        )
        self.filters = LogitFilters(self.req_states, self.sampling_states)
        self.logprobs = StepLogprobs(
            sampler.logprobs_mode, self.vocab_size, self.slots.canvas.device
        )
        # Host copies of slots.width and slots.fitted_end.
        self._widths = np.zeros(state.max_num_reqs, dtype=np.int64)
        self._fitted_ends = np.zeros(state.max_num_reqs, dtype=np.int64)
        self._num_stops = np.zeros(state.max_num_reqs, dtype=np.int64)  # of slots.stop_tokens
        # By slot; only requests that ask for one of these are in here.
        self._first_canvases: dict[int, torch.Tensor] = {}  # [width] int64, the caller's
        self._pinned: set[int] = set()
        trace_path = state.extension_config.trace_path
        self.trace = CanvasTrace(trace_path) if trace_path else None

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        options = RequestOptions.from_sampling_params(
            sampling_params, self.state.extension_config.defaults
        )
        self.prefills_emitted_tokens = options.joins_commits
        self.sampling_states.add_request(req_idx, sampling_params)
        self._added.append(req_idx)
        num_steps = self.config.max_denoising_steps
        if options.max_steps is not None:
            num_steps = min(options.max_steps, num_steps)
        width = options.canvas_length or self.canvas_length
        self._widths[req_idx] = width
        prompt_len = int(self.req_states.prompt_len.np[req_idx])
        end, stops = self._last_block(sampling_params, options, prompt_len)
        self._fitted_ends[req_idx] = end if options.fits_canvases else NO_END
        self.slots.reset(
            req_idx,
            seed=int(self.sampling_states.seeds.np[req_idx]),
            num_steps=num_steps,
            end=end,
            stop_tokens=stops + [NEVER] * (MAX_STOP_TOKENS - len(stops)),
            width=width,
            fitted_end=int(self._fitted_ends[req_idx]),
        )
        self._num_stops[req_idx] = len(stops)
        rule = options.window_rule or self.state.extension_config.window_rule
        self.slots.symmetric_window[req_idx].fill_(int(rule == "symmetric"))
        self.policies.add_request(req_idx, options, sampling_params.temperature, num_steps)
        self.filters.add_request(req_idx, sampling_params, options)
        self.logprobs.add_request(req_idx, sampling_params, options)

        self._first_canvases.pop(req_idx, None)
        self._pinned.discard(req_idx)
        # After a preemption the prefill holds the blocks committed so far, too.
        is_resumed = self.req_states.prefill_len.np[req_idx] > prompt_len
        if options.first_canvas is not None and not is_resumed:
            self._first_canvases[req_idx] = torch.tensor(options.first_canvas)
            if options.pinned:
                self.slots.pin(req_idx, options.first_canvas, options.pinned)
                self._pinned.add(req_idx)

    def _last_block(
        self, params: SamplingParams, options: RequestOptions, prompt_len: int
    ) -> tuple[int, list[int]]:
        """The position and the tokens by which the device tells a request's last block."""
        if options.read_only:
            return EVERY_BLOCK, []
        max_tokens = params.max_tokens
        end = self.state.max_model_len if max_tokens is None else prompt_len + max_tokens
        return min(end, self.state.max_model_len), stop_tokens(params)

    def apply_staged_writes(self) -> None:
        if self._added:
            self.sampling_states.apply_staged_writes()
            self.filters.apply_staged_writes()
            self._start_canvases(np.array(self._added, dtype=np.int64))
            self._added.clear()

    # --- a step -----------------------------------------------------------------------------

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, V] fp32, soft-capped; of a large vocabulary hidden states
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Advances every request of the batch by one step."""
        num_reqs, device = input_batch.num_reqs, logits.device
        if input_batch.num_draft_tokens_per_req is None:  # vLLM's dummy, to see what a step takes
            rows = min(self.state.max_num_tokens, self.state.max_num_reqs * self.canvas_length)
            num_bytes = step_bytes(self.model, rows, self._budget_bytes)
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if input_batch.num_draft_tokens == 0:
            none = torch.zeros(num_reqs, dtype=torch.int32, device=device)
            sampled = none[:, None].expand(-1, self.canvas_length)
            return _output(sampled, none, none, None)
        batch = self.state.canvas_batch
        assert batch is not None, "prepare_inputs runs before the sampler"
        best_guess, emitted, logprobs = self._advance_canvases(logits, batch, input_batch)
        # Tokens that are going to be prefilled are not in the cache yet.
        rejected = batch.lengths if self.prefills_emitted_tokens else batch.lengths - emitted
        if batch.num_canvases == num_reqs:
            return _output(best_guess, emitted, rejected, logprobs)

        # The others are in their prefill: they sample nothing and reject nothing.
        def spread(column: torch.Tensor) -> torch.Tensor:
            everyone = column.new_zeros(num_reqs, *column.shape[1:])
            return everyone.index_copy_(0, batch.requests, column)

        return _output(spread(best_guess), spread(emitted), spread(rejected), logprobs)

    def _cut_canvases(
        self, batch: CanvasBatch, starts: torch.Tensor, input_batch: InputBatch
    ) -> torch.Tensor | None:
        """[n] bool: canvases of which the scheduler ran only a part, for lack of token budget, or
        more than there is, because it did not know yet that a block had ended.

        Such a step says nothing about the canvas: it is taken back, and the canvas is scheduled
        again. A canvas that ends where the context ends is not cut. None: surely none.
        """
        slots = batch.slots_np
        most_ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]
        if (most_ends <= self._fitted_ends[slots]).all() and (
            batch.cells is None or (batch.lengths_np == self._widths[slots]).all()
        ):
            return None
        room = self.state.max_model_len - starts
        wanted = fitted_width(self.slots.fitted_end[batch.slots] - starts)
        width = torch.minimum(self.slots.width[batch.slots], wanted)
        return batch.lengths != torch.minimum(width, room)

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
        self, source: torch.Tensor, batch: CanvasBatch, input_batch: InputBatch
    ) -> tuple[torch.Tensor, torch.Tensor, LogprobsTensors | None]:
        """Denoises or commits each canvas. Returns best guesses [n, C], tokens emitted [n] and
        the log-probabilities of the emitted tokens."""
        slots, idx = self.slots, batch.slot_index
        numbers, tokens = slots.read_numbers(idx), slots.read_tokens(idx)
        block_ends = input_batch.seq_lens[batch.request_index]
        starts = block_ends - batch.lengths
        committing = numbers.is_committing == 1
        cut = self._cut_canvases(batch, starts, input_batch)
        earlier = None if cut is None else slots.progress(idx)

        policy = self.policies.of(batch)
        kind = StreamedLogits if self.model.streams_vocabulary else WholeLogits
        logits: CanvasLogits = kind(
            source,
            batch,
            starts,
            tokens.best_guess,
            self.soft_embedding,
            self.filters,
            self._budget_bytes,
        )
        step_temperature = temperature(
            numbers.steps_done, numbers.num_steps, policy.t_min, policy.t_span
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
        by_row, soft_rows = logits.read(row_temperature, batch.flatten(drawn.candidate))
        stats = RowStats(*(batch.unflatten(column) for column in by_row))
        if policy.is_greedy is not None:
            greedy = torch.where(policy.is_greedy[:, None], stats.best_guess, stats.candidate)
            stats = stats._replace(candidate=greedy)
        num_stops = self._num_stops[batch.slots_np].max()
        stops = slots.stop_tokens[idx][:, :num_stops]
        answer_only = None
        if policy.judges_answer_only is not None:
            answer_only = AnswerOnly(policy.judges_answer_only, stops)
        outcome = denoise_step(
            stats,
            batch.valid,
            CanvasState(
                tokens.best_guess, numbers.times_repeated, numbers.steps_done, numbers.num_steps
            ),
            drawn.renoise,
            policy.rules,
            revealing(policy, slots.revealed[idx], slots.canvas[idx]),
            answer_only,
        )

        denoised = ~committing
        finished = outcome.finished & denoised
        committed = committing[:, None]
        decided = outcome.state.best_guess
        best_guess = torch.where(committed, tokens.best_guess, decided)
        at_once = finished & self._emits_at_once(best_guess, batch, block_ends, numbers.end, stops)
        ends = committing | at_once  # blocks after which another one starts
        emitted = batch.lengths * ends
        # Before anything is written: it may apply the step's rules again.
        logprobs = self.logprobs.report(
            logits, row_temperature, decided, batch, input_batch.num_reqs, at_once, cut
        )

        canvas = torch.where(finished[:, None], best_guess, outcome.canvas)
        ended = ends[:, None]
        # A canvas starts with none.
        drops_soft = ended[..., None]
        if not self._pinned.isdisjoint(batch.slots_np.tolist()):
            # The caller's canvas and its pins belong to the first block alone.
            pinned = slots.pinned[idx] & ~ended
            slots.pinned[idx] = pinned
            canvas = torch.where(pinned & ~finished[:, None], tokens.first_canvas, canvas)
            drops_soft = drops_soft | pinned[..., None]
        slots.canvas[idx] = torch.where(ended, drawn.next_canvas, canvas)
        slots.soft_embeds[idx] = batch.unflatten(soft_rows).masked_fill_(drops_soft, 0.0)
        if policy.reveal is not None:
            slots.revealed[idx] = outcome.accepted & ~ended
        slots.write(
            idx,
            decided.masked_fill(ended, NO_TOKEN),
            outcome.state.steps_done.masked_fill(ends, 0),
            finished & ~at_once,
            outcome.state.times_repeated,
        )

        if cut is not None and earlier is not None:
            slots.take_back(idx, cut, earlier)
            emitted, denoised = torch.where(cut, 0, emitted), denoised & ~cut
        self.filters.count_emitted(batch, best_guess, emitted)

        if self.trace is not None:
            self.trace.record(input_batch, batch, stats, outcome, canvas, denoised, finished)
        return best_guess, emitted, logprobs

    def _emits_at_once(
        self,
        blocks: torch.Tensor,  # [n, C] int64
        batch: CanvasBatch,
        block_ends: torch.Tensor,  # [n] int64, absolute position after each block
        request_ends: torch.Tensor,  # [n] int64, see `_last_block`
        stops: torch.Tensor,  # [n, K] int64
    ) -> torch.Tensor | bool:
        """[n] bool: blocks that are emitted by the step that finishes them."""
        if self._spares_last_commit and self.prefills_emitted_tokens:
            return True
        is_last = is_last_block(blocks, batch.valid, block_ends, request_ends, stops)
        if self._spares_last_commit:
            return is_last
        is_read_only = request_ends == EVERY_BLOCK
        return is_read_only | ~is_last if self.prefills_emitted_tokens else is_read_only


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
