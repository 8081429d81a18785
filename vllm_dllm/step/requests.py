"""The worker's requests: adds them to slots and to the parts that keep what they ask for."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.config.architectures import family_of
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.denoise import noise
from vllm_dllm.requests.ends import EVERY_BLOCK, NO_END, foreseen_stop_tokens
from vllm_dllm.requests.options import RequestOptions, load_options, server_defaults
from vllm_dllm.step.asked.first_canvases import FirstCanvases, Predictions
from vllm_dllm.step.asked.grammar_runs import GrammarRuns
from vllm_dllm.step.asked.grammars import CanvasGrammars
from vllm_dllm.step.asked.logprobs import StepLogprobs
from vllm_dllm.step.asked.masked_settings import MaskedSlotSettings
from vllm_dllm.step.asked.settings import SlotSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.filters import LogitFilters
from vllm_dllm.step.slots import CanvasSlots, NewRequest, Registry
from vllm_dllm.step.watched.observers import CanvasObservers


class StepRequests:
    """Tells slots, and parts that keep what requests ask for, when requests come and leave."""

    def __init__(
        self,
        slots: CanvasSlots,
        sampler: Any,  # vLLM's own, for its per-request states
        settings: SlotSettings | MaskedSlotSettings,
        vllm_config: VllmConfig,
        mask_id: int | None = None,  # what a first canvas holds; None: noise
    ) -> None:
        self.slots, self.settings, model_config = slots, settings, vllm_config.model_config
        self.extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        self.vocab_size = model_config.get_vocab_size()
        self.mask_id = mask_id
        family = family_of(model_config.architecture, model_config.hf_config)
        self._unadmitted = RequestOptions(**server_defaults(self.extension.defaults, family))
        self.req_states = sampler.req_states
        self.sampling_states = sampler.sampling_states  # top_k, top_p, seeds
        # The scheduler's choices, which each request brings (`RequestOptions`).
        self.joins_commits = self.are_counted = False
        self._device = slots.canvas.device
        self._canvas_length = slots.canvas.shape[1]
        self._offsets = torch.arange(self._canvas_length, device=self._device)
        self.filters = LogitFilters(self.req_states, self.sampling_states)
        self.logprobs = StepLogprobs(sampler.logprobs_mode, self.vocab_size, self._device)
        grammars_cls = CanvasGrammars if mask_id is None else GrammarRuns
        self.grammars = grammars_cls(vllm_config, self.req_states, slots)
        self.first_canvases = FirstCanvases(slots)
        self.predictions = Predictions(slots, self.req_states)
        parallel = vllm_config.parallel_config
        self.observers = CanvasObservers(
            self.extension.trace_path,
            self._device,
            speaks=parallel.rank % parallel.tensor_parallel_size == 0,
        )
        self._registries: tuple[Registry, ...] = (
            self.settings,
            self.filters,
            self.logprobs,
            self.grammars,
            self.first_canvases,
            self.predictions,
            self.observers,
        )

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Stages a new request, or one that comes back after a preemption, for
        `apply_staged_writes`. Forgets the slot's earlier request."""
        options = load_options(params) or self._unadmitted  # a warm-up's
        self.joins_commits = options.joins_commits
        self.are_counted = options.is_counted
        self.sampling_states.add_request(slot, params)
        num_steps = self.settings.max_steps
        if options.max_steps is not None:
            num_steps = min(options.max_steps, num_steps)
        request = NewRequest(
            slot,
            params,
            options,
            prompt_len=int(self.req_states.prompt_len.np[slot]),
            prefill_len=int(self.req_states.prefill_len.np[slot]),
            num_steps=num_steps,
        )
        end, stops = self._find_end(request)
        self.slots.stage_request(
            slot,
            stops,
            noise_key=int(self.sampling_states.seeds.np[slot]),
            num_steps=num_steps,
            end=end,
            width=options.canvas_length or self._canvas_length,
            fitted_end=end if options.fits_canvases else NO_END,
            is_committing=options.is_verified and options.canvas_length == 1,  # nothing to draft
            symmetric_window=(options.window_rule or self.extension.window_rule) == "symmetric",
        )
        self.remove_request(slot)
        for registry in self._registries:
            registry.add_request(request)

    def _find_end(self, request: NewRequest) -> tuple[int, list[int]]:
        """Returns the absolute position and the stop tokens that end a request's last block. For a
        read-only request these are `EVERY_BLOCK` and no tokens."""
        if request.options.read_only:
            return EVERY_BLOCK, []
        end, max_tokens = self.max_model_len, request.params.max_tokens
        if max_tokens is not None:
            end = min(end, request.prompt_len + max_tokens)
        return end, foreseen_stop_tokens(request.params)

    @property
    def max_model_len(self) -> int:
        """Returns the most tokens of a request. With `--max-model-len auto`, vLLM lowers it after
        the model is loaded."""
        longest: int = self.req_states.max_model_len
        return longest

    def remove_request(self, slot: int) -> None:
        """Forgets what the slot's request asked for."""
        for registry in self._registries:
            registry.remove_request(slot)

    def are_plain(self, batch: CanvasBatch) -> bool:
        """Returns whether no request of these canvases has a grammar, pins, a prediction or a
        watcher, so that the fused kernels may settle them."""
        return not (
            self.grammars.any_in(batch)
            or self.first_canvases.has_pins(batch)
            or self.predictions.any_in(batch)
            or self.observers.are_watching(batch)
        )

    def apply_staged_writes(self) -> None:
        """Writes the slots of requests that came since the last step, and their first canvases,
        which begin where the prefill ends. Does nothing if no request came."""
        if not self.slots.has_staged:
            return
        self.sampling_states.apply_staged_writes()
        slots_np, idx = self.slots.apply_staged_writes()
        if self.mask_id is not None:
            self.slots.canvas.index_fill_(0, idx, self.mask_id)
        else:
            starts = self.req_states.prefill_len.np[slots_np].astype(np.int64)
            self.slots.canvas[idx] = noise.uniform_tokens(
                self.slots.read_numbers(idx).noise_key,
                async_tensor_h2d(starts, device=self._device)[:, None] + self._offsets,
                torch.zeros_like(idx),
                noise.INITIAL,
                self.vocab_size,
            )
        for registry in self._registries:
            registry.apply_staged_writes()
