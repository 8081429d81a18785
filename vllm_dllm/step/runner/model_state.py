"""vLLM's `ModelState` for diffusion models: embeddings, attention metadata, the sampler.

A request's phase lives on the device (`SlotNumbers.is_committing`) and is changed there by the
step, so a step can be prepared while the previous one still runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.tasks import GenerationTask
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata, ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_dllm.attention import WindowRules, takes_window_rules
from vllm_dllm.compat.gpu import capture_graphs, keep_during_sleep
from vllm_dllm.scheduling.spared_forwards import joins_commits
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.runner.attn_requests import AttnRequests, ImageRows, LatestMetadata
from vllm_dllm.step.runner.sampler import DiffusionSampler
from vllm_dllm.step.uniform.uniform_step import UniformStep

if TYPE_CHECKING:
    from vllm_dllm.step.uniform.step_graphs import StepGraphs


class DiffusionModelState(ModelState):
    """Hooks between the model runner and a block-diffusion model. The model offers
    `embed_input_ids`, `soft_embeddings` of a prediction, and `self_conditioning`."""

    num_new_sampled_tokens_per_step: int = 0  # a step samples a whole canvas or nothing
    step_cls: type[CanvasStep] = UniformStep
    step: CanvasStep  # made with the sampler, whose request states it needs
    forward_output: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)
    """Returns where the runner's captured forwards leave hidden states, [rows, H]. None: there are
    no such forwards."""
    _graphs: "StepGraphs | None" = None  # none where vLLM captures no steps
    _image_rows: ImageRows | None = None  # none where the server takes no images
    # Of the step's images: [tokens, H] each, and their rows [T] bool on the host.
    _images: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        """Allocates the buffers that captured CUDA graphs read at every replay."""
        super().__init__(vllm_config, model, encoder_cache, device)
        hidden_size = self.model_config.hf_text_config.hidden_size
        # On GPUs, comparing what metadata are made of would wait for the device.
        self._latest_metadata = LatestMetadata() if device.type == "cpu" else None
        num_embeds = self.max_num_tokens if self.step_cls.self_conditions else 0
        # Persistent: a captured CUDA graph reads these addresses at every replay.
        with keep_during_sleep(self.model_config):
            # A request may count as two (`AttnRequests`).
            self._causal = torch.zeros(2 * self.max_num_reqs, dtype=torch.int32, device=device)
            self._symmetric = torch.zeros_like(self._causal)
            self._inputs_embeds = torch.zeros(
                num_embeds, hidden_size, dtype=self.dtype, device=device
            )
            if self.supports_mm_inputs:
                self._image_rows = ImageRows(self.max_num_reqs, self.max_num_tokens, device)
        # Whether an image's tokens see each other both ways; else they are causal like text.
        self._images_are_whole = (
            getattr(self.model_config.hf_text_config, "use_bidirectional_attention", None)
            == "vision"
        )

    def get_supported_generation_tasks(self) -> tuple[GenerationTask, ...]:
        return ("generate",)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Makes the step with the request states of vLLM's `sampler`. Returns its sampler, and None
        for no rejection sampler."""
        with keep_during_sleep(self.model_config):
            step = self.step_cls(self.vllm_config, self.model, sampler, self.device)
        self.step = step
        self.model.sampler_reads_hidden_states = lambda: step.reads_hidden_states
        max_rows = min(self.max_num_tokens, self.max_num_reqs * step.canvas_length)
        return DiffusionSampler(step, max_rows), None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Keeps a request's images. The sampler, which gets its parameters, prepares its slot."""
        if self._image_rows is not None:
            self._image_rows.add_request(req_index, new_req_data.mm_features)

    def remove_request(self, req_id: str) -> None:
        """Forgets a request that has ended or was preempted. Does nothing for an unknown one."""
        requests = self.step.requests
        # vLLM calls this before it frees the slot in `req_states`.
        if (slot := requests.req_states.req_id_to_index.get(req_id)) is not None:
            requests.remove_request(slot)
            if self._image_rows is not None:
                self._image_rows.remove_request(slot)

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor | None:
        """Runs the vision tower for the step's images. Returns None: see `prepare_inputs`."""
        self._images = None
        if self._image_rows is not None:
            self.execute_mm_encoder(scheduled_encoder_inputs)
            if len(self._image_rows.requests_with_images(input_batch)):
                self._images = self.gather_mm_embeddings(input_batch)
        return None

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Returns the embeddings of a step's tokens, self-conditioned in rows that are denoised."""
        assert isinstance(self.step, UniformStep), "masked models have a state of their own"
        self.step.begin_step(input_batch)
        if self._graphs is None or not self._graphs.can_replay(self.step.batch):
            num_tokens = input_batch.num_tokens
            input_ids, images = input_batch.input_ids[:num_tokens], self._images
            if images is None:
                plain = self.model.embed_input_ids(input_ids)
            else:
                plain = self.model.embed_input_ids(input_ids, images[0], is_multimodal=images[1])
            self.step.condition(plain, self.step.batch, out=self._inputs_embeds[:num_tokens])
        return {"inputs_embeds": self._inputs_embeds[: input_batch.num_tokens_after_padding]}

    def capture_inner_cudagraphs(
        self,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Captures graphs of what steps launch around the forward, which vLLM has captured."""
        self.drop_graphs()
        step, config = self.step, self.vllm_config
        if not isinstance(step, UniformStep) or not step.fuses:
            return
        from vllm_dllm.step.uniform.step_graphs import StepGraphs, can_be_captured  # needs Triton

        if not can_be_captured(step, config):
            return
        largest = config.compilation_config.max_cudagraph_capture_size or 0
        with keep_during_sleep(self.model_config):
            graphs = StepGraphs(
                min(self.max_num_reqs, largest // step.canvas_length),
                step.slots.soft_embeds,
                joins_commits=joins_commits(config),
                forward_output=self.forward_output(),
            )
        with capture_graphs(config, self.device) as capture:  # into a pool of its own
            graphs.capture(
                capture,
                partial(self._prepare_whole_canvases, input_buffers.input_ids),
                partial(step.settle_whole, input_buffers.seq_lens, graphs.joins_commits),
            )
        self._graphs = step.graphs = graphs

    def _prepare_whole_canvases(self, input_ids: torch.Tensor, batch: CanvasBatch) -> None:
        """Writes the flags and embeddings of a step of whole canvases; captured as a CUDA graph.
        `input_ids` [>= n * C] int: the runner's."""
        assert isinstance(self.step, UniformStep)
        n = batch.num_canvases
        num_tokens = n * batch.canvas_length
        self._causal[:n] = self.step.slots.are_committing(batch.slots)
        self._symmetric[:n] = self.step.slots.columns.symmetric_window[batch.slots]
        plain = self.model.embed_input_ids(input_ids[:num_tokens])
        self.step.condition(plain, batch, out=self._inputs_embeds[:num_tokens])

    def drop_graphs(self) -> None:
        """Drops the graphs of `capture_inner_cudagraphs`, which vLLM will call again."""
        self._graphs = None
        if isinstance(self.step, UniformStep):
            self.step.graphs = None

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {"inputs_embeds": self._inputs_embeds[:num_tokens]}

    def attn_requests(
        self, input_batch: InputBatch, block_tables: Sequence[torch.Tensor]
    ) -> AttnRequests:
        """Returns the step's requests as attention sees them."""
        return AttnRequests.build(input_batch, block_tables, self.device)

    def causal(self, requests: AttnRequests, input_batch: InputBatch) -> torch.Tensor | int:
        """Returns `causal` of each request, [N] int, or one number for all: see
        `attention_kernels.masks`."""
        causal = self.step.slots.are_committing(requests.slots)
        if input_batch.has_prefill:
            causal.masked_fill_(async_tensor_h2d(requests.is_prompt, device=self.device), 1)
        return causal

    def _write_flags(self, requests: AttnRequests, input_batch: InputBatch) -> None:
        """Writes the causal flags and window rules of a step to buffers that attention reads."""
        if self._graphs is not None:
            self.step.begin_step(input_batch)
            batch = self.step.batch
            if batch is not None and self._graphs.can_replay(batch):
                # `prepare_inputs` comes later, with nothing left to do.
                self._graphs.replay_before(batch)
                return
        num_reqs = len(requests.is_prompt)
        self._causal[:num_reqs] = self.causal(requests, input_batch)
        self._symmetric[:num_reqs] = self.step.slots.columns.symmetric_window[requests.slots]

    @property
    def by_blocks(self) -> bool:
        """Returns whether `causal` may be more than 1, see `WindowRules.by_blocks`."""
        return False

    def image_spans(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode
    ) -> torch.Tensor | None:
        """Returns `WindowRules.spans` of this step, [the batch's rows, 2] int32. Returns None if no
        row belongs to an image."""
        if self._image_rows is None or not self._images_are_whole:
            return None
        return self._image_rows.spans(input_batch)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """Returns a step's attention metadata, by layer name. Writes the step's flags first."""
        # A capture (`for_capture`) builds what a step does: the same buffers, so replays read them.
        requests = self.attn_requests(input_batch, block_tables)
        num_reqs, num_tokens = len(requests.is_prompt), input_batch.num_tokens
        query_start_loc, query_start_loc_np = requests.query_start_loc, requests.query_start_loc_np
        seq_lens = requests.seq_lens
        if self._graphs is not None:
            self._graphs.forward_is_captured = cudagraph_mode == CUDAGraphMode.FULL
        self._write_flags(requests, input_batch)
        if cudagraph_mode == CUDAGraphMode.FULL:
            assert num_reqs == input_batch.num_reqs, "the scheduler joins nothing under full graphs"
            num_reqs = input_batch.num_reqs_after_padding
            num_tokens = input_batch.num_tokens_after_padding
            query_start_loc = input_batch.query_start_loc[: num_reqs + 1]
            query_start_loc_np = input_batch.query_start_loc_np[: num_reqs + 1]
            seq_lens = input_batch.seq_lens
            if num_reqs > input_batch.num_reqs:
                self._causal[input_batch.num_reqs : num_reqs] = 0
        causal, symmetric = self._causal[:num_reqs], self._symmetric[:num_reqs]
        spans = self.image_spans(input_batch, cudagraph_mode)
        spans = spans if spans is None else spans[:num_tokens]
        rules = WindowRules(symmetric, spans, by_blocks=self.by_blocks)
        build = partial(
            build_attn_metadata,
            attn_groups=attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc_gpu=query_start_loc,
            query_start_loc_cpu=torch.from_numpy(query_start_loc_np),
            max_query_len=requests.max_query_len,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len,
            block_tables=requests.block_tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            causal=causal,
            model_specific_attn_metadata=_AttnExtras(rules),
        )
        if self._latest_metadata is None:
            return build()
        return self._latest_metadata.get_or_build(build, requests, causal, rules, slot_mappings)


class _AttnExtras(ModelSpecificAttnMetadata):
    """Hands the requests' window rules to the metadata builders that take them."""

    def __init__(self, window_rules: WindowRules) -> None:
        self.window_rules = window_rules

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        """Returns the window rules for builders that take them; nothing for others."""
        if takes_window_rules(attn_metadata_builder):
            return {"window_rules": self.window_rules}
        return {}
