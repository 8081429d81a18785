"""One step of all canvases: what the slots hold is read, denoised, settled and written back.

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
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.requests.options import narrowed_width
from vllm_dllm.scheduling.spared_forwards import spares_last_commit
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Advanced, Denoised, Found
from vllm_dllm.step.logits.sampling_memory import SamplingMemory
from vllm_dllm.step.logits.soft_embedding import SoftEmbedding
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.settling import Settling
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers
from vllm_dllm.step.watched.canvas_record import StepCanvases
from vllm_dllm.step.watched.counted import canvas_numbers


class CanvasStep(ABC):
    """Owns the requests' slots, the canvases of the current step and the phase of each."""

    self_conditions: bool  # each step reads the one before's expected embeddings

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        sampler: Any,  # vLLM's own, for its per-request states
        device: torch.device,
    ) -> None:
        assert vllm_config.diffusion_config is not None, "vLLM makes it for diffusion architectures"
        model_config = vllm_config.model_config
        self.model = model
        self.canvas_length = vllm_config.diffusion_config.canvas_length
        self.vocab_size = model_config.get_vocab_size()
        self.max_model_len = model_config.max_model_len
        self.extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        self.memory = SamplingMemory(self.extension.sampling_memory_mib << 20)
        self.device = device
        self.fuses = device.type == "cuda"  # runs our kernels in place of many small operations

        self.batch: CanvasBatch | None = None  # from `begin` to `advance`
        self._numbers: CanvasNumbers | None = None  # from `advance` to `take_numbers`
        self.slots = CanvasSlots(
            sampler.req_states.draft_tokens[:, : self.canvas_length],
            model_config.hf_text_config.hidden_size if self.self_conditions else 0,
            model_config.dtype,
        )
        self.requests = self._make_requests(vllm_config, sampler)
        self.settling = Settling(
            self.slots, self.requests, spares_last_commit=spares_last_commit(vllm_config)
        )
        self.soft_embedding = SoftEmbedding(
            model,
            self.extension.self_conditioning_tolerance,
            self.extension.self_conditioning_top_k,
        )

    @abstractmethod
    def _make_requests(self, vllm_config: VllmConfig, sampler: Any) -> StepRequests:
        """What the model's kind of canvas asks of its requests."""

    def num_recomputed(self, input_batch: InputBatch) -> torch.Tensor | None:
        """[num_reqs] int64: of each request's known tokens in this step, those whose keys and
        values the next step computes anew. None: of no request."""
        return None

    def begin(self, input_batch: InputBatch) -> None:
        """Learns before the forward which canvases it holds."""
        self.batch = None
        if input_batch.num_draft_tokens > 0:
            self.batch = CanvasBatch.build(input_batch, self.canvas_length, self.device)

    def start_canvases(
        self,
        source: torch.Tensor,  # [rows, V], or hidden states
        input_batch: InputBatch,
    ) -> torch.Tensor:
        """Comes after the forward, before `advance`: gives requests whose prefill it ended what
        their first canvas takes from it. Returns the rows that are canvases'."""
        return source

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the logits asked for next are the canvases', and these are read tile by tile."""
        return self.batch is not None and self.model.streams_vocabulary

    def advance(
        self,
        source: torch.Tensor,  # [rows, V] fp32 soft-capped logits, or [rows, H] hidden states
        input_batch: InputBatch,
    ) -> Advanced:
        """Denoises or commits, after the forward, each canvas that `begin` found."""
        batch = self._take_batch()
        return self._advance(self._read(batch, input_batch), source, input_batch)

    def _take_batch(self) -> CanvasBatch:
        batch, self.batch = self.batch, None
        assert batch is not None, "begin comes first"
        return batch

    def _advance(self, found: Found, source: torch.Tensor, input_batch: InputBatch) -> Advanced:
        batch = found.batch
        denoised = self._denoise(found, source)
        settled = self.settling.settle(found, denoised)
        drafts = None if denoised.verified is None else denoised.verified.drafts
        # Before anything is written: it may apply the step's rules again.
        logprobs = self.requests.logprobs.report(
            denoised.logits,
            denoised.row_temperature,
            settled.best_guess if drafts is not None else denoised.outcome.state.best_guess,
            batch,
            input_batch.num_reqs,
            settled.at_once,
            found.cut,
            denoised.placed,
            None if drafts is None else drafts.are_np,
        )
        canvas = self.settling.write(found, denoised, settled)
        if found.cut is not None and found.earlier is not None:
            self.slots.take_back(batch.slot_index, found.cut, found.earlier)
            self.requests.grammars.apply_staged_writes(within_s=0)
        self.requests.filters.count_emitted(batch, settled.best_guess, settled.emitted)
        if self.requests.observers.look_at(batch):
            outcome = denoised.outcome
            shown = StepCanvases(
                tokens=outcome.state.best_guess,
                accepted=outcome.accepted,
                next_canvas=canvas,
                entropy_nats=denoised.stats.entropy_nats,
                step=outcome.state.steps_done,
                temperature=denoised.temperature,
                start=found.starts,
                denoises=settled.denoises,
                finished=settled.finished,
            )
            self.requests.observers.show(shown, batch, input_batch.req_ids)
        cut = self.requests.grammars.cut_answers(batch)
        says_more = denoised.is_committed is not None or drafts is not None or cut
        if self.requests.are_counted or says_more:
            self._numbers = canvas_numbers(
                batch,
                denoised.outcome,
                denoised.stats.entropy_nats,
                settled.denoises,
                denoised.is_committed,
                None if drafts is None else drafts.are_verified,
                cut,
            )
        rejected = batch.lengths
        if settled.committed is not None:
            rejected = rejected - settled.committed
        return Advanced(settled.best_guess, settled.emitted, rejected, logprobs)

    @abstractmethod
    def _denoise(self, found: Found, source: torch.Tensor) -> Denoised:
        """What a step would make of each canvas. Writes nothing."""

    def take_numbers(self) -> CanvasNumbers | None:
        """Numbers of the step just taken, for the metrics. None: nobody counts, or it had no
        canvas."""
        numbers, self._numbers = self._numbers, None
        return numbers

    def _read(self, batch: CanvasBatch, input_batch: InputBatch) -> Found:
        slots, idx = self.slots, batch.slot_index
        numbers = slots.read_numbers(idx)
        block_ends = input_batch.seq_lens[batch.request_index]
        starts = block_ends - batch.lengths
        num_stops = slots.num_stops[batch.slots_np].max()
        cut = self._cut_canvases(batch, numbers, starts, input_batch)
        compiling = self.requests.grammars.compiling(batch)
        if compiling is not None:
            cut = compiling if cut is None else cut | compiling
        return Found(
            batch,
            numbers,
            slots.read_tokens(idx),
            starts,
            block_ends,
            slots.stop_tokens[idx][:, :num_stops],
            self.requests.settings.for_batch(batch),
            cut,
            None if cut is None else slots.progress(idx),
        )

    def _cut_canvases(
        self,
        batch: CanvasBatch,
        numbers: SlotNumbers,
        starts: torch.Tensor,  # [n] int64
        input_batch: InputBatch,
    ) -> torch.Tensor | None:
        """[n] bool: canvases of which the scheduler ran only a part, for lack of token budget, or
        more than there is, because it did not know yet that a block had ended.

        Such a step says nothing about the canvas: it is taken back, and the canvas is scheduled
        again. A canvas that ends where the context ends is not cut. None: surely none.
        """
        slots = batch.slots_np
        most_ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]
        if (most_ends <= self.slots.host_values("fitted_end", slots)).all() and (
            batch.cells is None
            or (batch.lengths_np == self.slots.host_values("width", slots)).all()
        ):
            return None
        room = self.max_model_len - starts
        width = torch.minimum(numbers.width, narrowed_width(numbers.fitted_end - starts))
        return batch.lengths != torch.minimum(width, room)
