"""One step of all canvases: reads the slots, denoises, settles what becomes of each canvas, and
writes the slots.

In vLLM's speculative-decoding accounting the canvas is a set of draft tokens. A denoise step
samples 0 tokens and rejects the whole canvas, so the KV position stays. A finished canvas is
sampled at once if it is the last, or if the next step commits it beside the next canvas
(`spared_forwards.joins_commits`); else it has a commit, which samples the whole canvas and rejects
nothing. The phase lives on the device, so each step computes both outcomes and selects.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.step_sizes import narrowed_width
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.scheduling.spared_forwards import spares_last_commit
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Settled, Settling, StepInputs, StepResult
from vllm_dllm.step.logits.canvas_logits import LogitTools, SamplingMemory
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.slots import CanvasSlots
from vllm_dllm.step.watched.canvas_sender import StepCanvases
from vllm_dllm.step.watched.observers import count_canvases


class CanvasStep(ABC):
    """Runs the steps of all canvases. Owns the requests' slots and the batch of the current step.
    Subclasses make the requests' state and denoise."""

    self_conditions: bool  # whether a step reads the expected embeddings of the one before

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        sampler: Any,  # vLLM's own, for its per-request states
        device: torch.device,
    ) -> None:
        """Allocates the requests' slots. Their canvases are views of the runner's draft tokens."""
        assert vllm_config.diffusion_config is not None, "vLLM makes it for diffusion architectures"
        model_config = vllm_config.model_config
        self.model = model
        self.canvas_length = vllm_config.diffusion_config.canvas_length
        self.vocab_size, self.dtype = model_config.get_vocab_size(), model_config.dtype
        self.extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        self.memory = SamplingMemory(self.extension.sampling_memory_mib << 20)
        self.device = device
        self.fuses = device.type == "cuda"  # runs Triton kernels in place of small operations

        self.batch: CanvasBatch | None = None  # set from `begin_step` to `take_batch`
        self._numbers: CanvasNumbers | None = None  # set from `advance` to `take_numbers`
        self.slots = CanvasSlots(
            sampler.req_states.draft_tokens[:, : self.canvas_length],
            model_config.hf_text_config.hidden_size if self.self_conditions else 0,
            self.dtype,
        )
        self.requests = self._make_requests(vllm_config, sampler)
        self.settling = Settling(
            self.slots, self.requests, spares_last_commit=spares_last_commit(vllm_config)
        )
        self.soft_embedding = SoftEmbedding(
            model,
            self.extension.self_conditioning_tolerance,
            self.extension.self_conditioning_top_k if self.self_conditions else None,
        )
        self.logit_tools = LogitTools(self.soft_embedding, self.requests.filters, self.memory)

    @abstractmethod
    def _make_requests(self, vllm_config: VllmConfig, sampler: Any) -> StepRequests:
        """Returns the requests' state, with the settings of the model's kind of canvas."""

    def num_recomputed(
        self, batch: CanvasBatch | None, input_batch: InputBatch
    ) -> torch.Tensor | None:
        """Returns [num_reqs] int64: how many of each request's known tokens in this step the next
        step computes again. Returns None if there are none, as in this class."""
        return None

    def begin_step(self, input_batch: InputBatch) -> None:
        """Sets `batch` to the canvases of a step; None: it has none. Called before its forward."""
        self.batch = None
        if input_batch.num_draft_tokens > 0:
            self.batch = CanvasBatch.build(input_batch, self.canvas_length, self.device)

    def take_batch(self) -> CanvasBatch | None:
        """Returns the canvases of the step, and sets `batch` to None. Called after the forward."""
        batch, self.batch = self.batch, None
        return batch

    def start_canvases(  # noqa: B027
        self,
        batch: CanvasBatch | None,
        source: torch.Tensor,  # [rows, V] fp32; the rows of `batch` come first
        input_batch: InputBatch,
    ) -> None:
        """Hook: writes the first tokens of canvases into their slots, if the prefill's logits
        predict these. Called after the forward, before `advance`. Does nothing in this class."""

    @property
    def reads_hidden_states(self) -> bool:
        """Returns whether the model must return hidden states: the step has canvases, and the
        sampler reads the vocabulary itself."""
        return self.batch is not None and self.model.streams_vocabulary

    def advance(
        self,
        batch: CanvasBatch,
        source: torch.Tensor,  # [rows, V] fp32 soft-capped logits, or [rows, H] hidden states
        input_batch: InputBatch,
    ) -> StepResult:
        """Denoises or commits each canvas of `batch`, and writes its slot. Called after the
        forward, only if the step has canvases."""
        return self._denoise_and_settle(self._read_slots(batch, input_batch), source, input_batch)

    def _denoise_and_settle(
        self, inputs: StepInputs, source: torch.Tensor, input_batch: InputBatch
    ) -> StepResult:
        """Denoises or commits the canvases, writes their slots, and shows and counts them for those
        who asked. Returns what the step made of them."""
        batch = inputs.batch
        denoised = self._denoise(inputs, source)
        settled = self.settling.settle(inputs, denoised)
        guess = denoised.outcome.state.best_guess
        # Before anything is written: it may apply the step's rules again.
        logprobs = self.requests.logprobs.report(
            batch,
            denoised.logits,
            denoised.row_temperature,
            guess if inputs.drafts is None else settled.best_guess,
            num_reqs=input_batch.num_reqs,
            at_once=settled.at_once,
            cut=inputs.cut,
            placements=denoised.placements,
            are_drafts=None if inputs.drafts is None else inputs.drafts.is_draft_np,
        )
        canvas = self.settling.write_slots(inputs, denoised, settled)
        if inputs.cut is not None and inputs.earlier is not None:
            self.slots.restore(batch.slot_index, inputs.cut, inputs.earlier)
            self.requests.grammars.apply_staged_writes(within_s=0)
        self.requests.filters.count_emitted(batch, settled.best_guess, settled.emitted)
        if self.requests.observers.are_watching(batch):
            shown = _show_canvases(inputs, denoised, settled, canvas)
            self.requests.observers.show_step(shown, batch, input_batch.req_ids)
        self._count_canvases(inputs, denoised, settled)
        rejected = batch.lengths
        if settled.committed is not None:
            rejected = rejected - settled.committed
        return StepResult(settled.best_guess, settled.emitted, rejected, logprobs)

    def _count_canvases(self, inputs: StepInputs, denoised: Denoised, settled: Settled) -> None:
        """Sets `_numbers` to the step's numbers, if somebody counts or an answer needs them."""
        cut = self.requests.grammars.cut_answers(inputs.batch)
        needs_numbers = denoised.is_committed is not None or inputs.drafts is not None or cut
        if self.requests.are_counted or needs_numbers:
            self._numbers = count_canvases(inputs, denoised, settled, cut)

    @abstractmethod
    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Returns each canvas' outcome of a denoise step. Leaves slots' progress to `Settling`."""

    def take_numbers(self) -> CanvasNumbers | None:
        """Returns the numbers of the latest step for the metrics, and forgets them. Returns None if
        nobody counts or the step had no canvas."""
        numbers, self._numbers = self._numbers, None
        return numbers

    def _read_slots(self, batch: CanvasBatch, input_batch: InputBatch) -> StepInputs:
        """Reads the slots of a step's canvases. Finds canvases whose step is taken back, since they
        were cut or their grammar is not compiled, and copies what to restore."""
        slots, idx = self.slots, batch.slot_index
        block_ends = input_batch.seq_lens[batch.request_index]
        if batch.behind is not None:
            block_ends = block_ends - batch.behind
        num_stops = slots.num_stops[batch.slots_np].max()
        inputs = StepInputs(
            batch=batch,
            numbers=slots.read_numbers(idx),
            tokens=slots.read_tokens(idx),
            starts=block_ends - batch.lengths,
            block_ends=block_ends,
            stops=slots.stop_tokens[idx][:, :num_stops],
            settings=self.requests.settings.for_batch(batch),
        )
        cut = self._cut_canvases(inputs, input_batch)
        compiling = self.requests.grammars.still_compiling(batch)
        if compiling is not None:
            cut = compiling if cut is None else cut | compiling
        if cut is None:
            return inputs
        return inputs._replace(cut=cut, earlier=slots.snapshot(idx))

    def _cut_canvases(self, inputs: StepInputs, input_batch: InputBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases of which the scheduler ran too few or too many rows. It runs
        too few for lack of token budget. It runs too many if it did not know yet that a block had
        ended. Returns None if surely no canvas is cut. The step of a cut canvas is taken back, and
        the canvas is scheduled again. A canvas that ends where the context ends is not cut."""
        batch, numbers = inputs.batch, inputs.numbers
        slots = batch.slots_np
        most_ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]
        if (most_ends <= self.slots.host_values("fitted_end", slots)).all() and (
            batch.cells is None
            or (batch.lengths_np == self.slots.host_values("width", slots)).all()
        ):
            return None
        room = self.requests.max_model_len - inputs.starts
        width = torch.minimum(numbers.width, narrowed_width(numbers.fitted_end - inputs.starts))
        return batch.lengths != torch.minimum(width, room)


def _show_canvases(
    inputs: StepInputs,
    denoised: Denoised,
    settled: Settled,
    next_canvas: torch.Tensor,  # [n, C] int64, what the next denoise step would read
) -> StepCanvases:
    """Returns what a step did to its canvases, for those who watch. A draft is finished by the step
    that verifies it, and then has the tokens that join the answer."""
    outcome, drafts = denoised.outcome, inputs.drafts
    shown = StepCanvases(
        tokens=outcome.state.best_guess,
        accepted=outcome.accepted,
        next_canvas=next_canvas,
        entropy_nats=denoised.stats.entropy_nats,
        step=outcome.state.steps_done,
        temperature=denoised.temperature,
        start=inputs.starts,
        length=inputs.batch.lengths,
        denoises=settled.denoises,
        finished=settled.finished,
    )
    if drafts is None:
        return shown
    is_over = drafts.is_draft & (settled.emitted > 0)
    in_block = torch.arange(shown.tokens.shape[1], device=is_over.device) < settled.emitted[:, None]
    before = shown.entropy_nats.roll(1, dims=1)  # a row that verifies predicts the next position
    before[:, 0] = 0.0  # known before the draft
    return shown._replace(
        tokens=settled.best_guess,
        accepted=torch.where(is_over[:, None], in_block, shown.accepted),
        entropy_nats=torch.where(drafts.verified_now[:, None], before, shown.entropy_nats),
        length=torch.where(is_over, settled.emitted, shown.length),
        # Where nothing is drafted, there is no canvas.
        denoises=shown.denoises | (is_over & (inputs.numbers.width > 1)),
        finished=torch.where(drafts.is_draft, is_over, shown.finished),
    )
