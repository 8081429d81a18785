"""Every name that vLLM keeps private and this project needs. Written against vLLM 0.32.0.

Those of drafting are in `drafting`, and in `dflash` where they load a model's code.
`tests/test_compat.py` fails loudly when one of them moves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import vllm.config.vllm as vllm_config_module
import vllm.triton_utils as triton_utils
from vllm import _custom_ops, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models import config as models_config
from vllm.sampling_params import SamplingParams
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched import diffusion_scheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import input_processor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

write_cpu_kv_cache = _custom_ops.cpu_attn_reshape_and_cache
cpp_rms_norm = _custom_ops.rms_norm


@contextmanager
def override_cpu_attention_backend(class_path: str) -> Iterator[None]:
    """Makes attention layers built inside use `class_path` where vLLM picks its CPU backend.

    vLLM remembers the backend it picked for a configuration, so the memory is cleared on both ends.
    """
    backend = AttentionBackendEnum.CPU_ATTN
    register_backend(backend, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def register_custom_attention_backend(class_path: str) -> None:
    """`--attention-backend CUSTOM` means `class_path`, unless another extension was here first: the
    only name vLLM leaves to extensions that all of its processes know. Repeatable."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, class_path)


def custom_attention_backend(class_path: str) -> AttentionBackendEnum | None:
    """CUSTOM, if it means `class_path`."""
    custom = AttentionBackendEnum.CUSTOM
    return custom if custom.is_overridden() and custom.get_path() == class_path else None


def set_request_check(check: Callable[..., Any]) -> None:
    """Replaces vLLM's admission check of diffusion requests, `validate_diffusion_sampling_params`,
    by `check`, of the same signature."""
    input_processor.validate_diffusion_sampling_params = check


def set_choices_check(check: Callable[[SamplingParams], None]) -> None:
    """`check` sees, at their admission, the sampling parameters of diffusion requests that name the
    tokens to choose among, with the stop tokens and bad words that the engine will see."""
    if input_processor.InputProcessor._validate_params.__module__ == __name__:
        return
    stock_validate_params = input_processor.InputProcessor._validate_params

    def validate_params(self: input_processor.InputProcessor, params: Any, *args: Any) -> Any:
        found = stock_validate_params(self, params, *args)
        names_tokens = isinstance(params, SamplingParams) and (
            params.allowed_token_ids or params.logprob_token_ids
        )
        if self.model_config.is_diffusion and names_tokens:
            own = params.clone()
            eos = self.renderer.get_eos_token_id()
            own.update_from_generation_config(self.generation_config_fields, eos)
            if self.tokenizer is not None:
                own.update_from_tokenizer(self.tokenizer)
            check(own)
        return found

    input_processor.InputProcessor._validate_params = validate_params


def set_serving_config(architecture: str, serving_config: type) -> None:
    """Makes `serving_config`, a VerifyAndUpdateConfig, adjust vLLM's configuration for models of
    `architecture`."""
    models_config.MODELS_CONFIG_MAP[architecture] = serving_config


class SchedulerHooks(Scheduler):
    """vLLM's scheduler, with some of its steps open to subclasses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _ask_for_draft_tokens_only_if_needed()

    @property
    def knows_draft_tokens(self) -> bool:
        """Whether the engine may save itself the question what the step just run has drafted."""
        return False

    def complete_output(self, output: SchedulerOutput) -> None:
        """May change what a step schedules, before it is counted."""

    def output_counted(self, output: SchedulerOutput) -> None:
        """The step `output` is on its way, and the requests' counters have moved on."""

    def block_emitted(self, request: Request, block_length: int) -> None:
        """`request` has just got a block of `block_length` tokens, and goes on."""

    def request_stopped(self, request: Request, block_length: int, num_kept: int) -> None:
        """`request` has just ended with a block of `block_length` tokens, the first `num_kept` of
        which are its own. Its cache blocks are still there, unless it was preempted meanwhile
        and has no computed tokens."""

    def output_arrived(self, output: ModelRunnerOutput) -> None:
        """The worker's answer, before anything is made of it."""

    def output_processed(self, output: SchedulerOutput) -> None:
        """The requests have what the step `output` gave them."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self.output_arrived(model_runner_output)
        found = super().update_from_output(scheduler_output, model_runner_output)
        self.output_processed(scheduler_output)
        return found

    def take_new_blocks_to_zero(self) -> list[int]:
        """Cache blocks handed out since the last call that must be zeroed before use."""
        return self._get_new_block_ids_to_zero() or []

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self.complete_output(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self.output_counted(scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        block_length = len(new_token_ids)
        kept, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if stopped:
            self.request_stopped(request, block_length, len(kept))
        else:
            self.block_emitted(request, block_length)
        return kept, stopped


def _ask_for_draft_tokens_only_if_needed() -> None:
    """After each step the engine asks the worker for draft tokens, a round trip between processes
    (0.7 ms of 15 on two cores). A scheduler that knows them spares it. Repeatable."""
    from vllm.v1.engine.core import EngineCore  # loaded by now: it makes the scheduler

    if EngineCore.post_step.__module__ == __name__:
        return
    stock_post_step = EngineCore.post_step

    def post_step(self: EngineCore, model_executed: bool) -> None:
        if not getattr(self.scheduler, "knows_draft_tokens", False):
            stock_post_step(self, model_executed)

    EngineCore.post_step = post_step


def prefill_emitted_tokens() -> None:
    """A worker's requests have all tokens that the scheduler knows of as their prefill, emitted
    ones too: those that are not computed yet are read from the request, like a prompt. For
    schedulers that do not run ahead of the tokens. Repeatable."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # made this process' worker

    if GPUModelRunner.update_requests.__module__ == __name__:
        return
    stock_update_requests = GPUModelRunner.update_requests

    def update_requests(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> None:
        cached, states = scheduler_output.scheduled_cached_reqs, self.req_states
        if cached.req_ids and getattr(self.sampler, "prefills_emitted_tokens", False):
            slots = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
            prompts = states.prompt_len.np[slots]
            states.prefill_len.np[slots] = prompts + np.array(cached.num_output_tokens)
            states.prefill_len.copy_to_uva()
        stock_update_requests(self, scheduler_output)

    GPUModelRunner.update_requests = update_requests


def score_prompts_by(num_rows: int) -> None:
    """A worker's prompt log-probabilities are made of the logits of so many rows at a time, or of
    vLLM's 1024 if that is less. Repeatable."""
    from vllm.v1.worker.gpu.sample import prompt_logprob  # made this process' worker

    prompt_logprob.CHUNK_SIZE = min(num_rows, PROMPT_ROWS)


PROMPT_ROWS = 1024
"""vLLM's own."""


def replace_rejection_sample(replacement: Callable[..., Any]) -> None:
    """Makes this process verify drafts with `replacement`. Repeatable."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # made this process' worker

    rejection_sampler.rejection_sample = replacement


def stock_rejection_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    return rejection_sampler_utils.rejection_sample(*args, **kwargs)


StockDiffusionScheduler = diffusion_scheduler.DiffusionScheduler
StockDiffusionAsyncScheduler = diffusion_scheduler.DiffusionAsyncScheduler
stock_canvas_width = diffusion_scheduler.diffusion_canvas_width
_stock_schedulers = {
    "DiffusionScheduler": StockDiffusionScheduler,
    "DiffusionAsyncScheduler": StockDiffusionAsyncScheduler,
}


def set_schedulers(architecture: str, schedulers: Mapping[str, str]) -> None:
    """Replaces vLLM's diffusion schedulers, for models of `architecture`.

    `schedulers` maps the names of vLLM's classes to the paths of those that take their place.
    vLLM finds its classes by these names after it has settled whether to schedule asynchronously,
    which `scheduler_cls` would have to know before.
    """

    def choose(name: str, path: str) -> Callable[..., Any]:
        def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
            ours = vllm_config.model_config.architecture == architecture
            scheduler = resolve_obj_by_qualname(path) if ours else _stock_schedulers[name]
            return scheduler(vllm_config, *args, **kwargs)

        return make_scheduler

    for name, path in schedulers.items():
        setattr(diffusion_scheduler, name, choose(name, path))


def set_canvas_width(canvas_width: Callable[[Request, int], int]) -> None:
    """Makes vLLM's diffusion schedulers ask `canvas_width`, of the signature of
    `stock_canvas_width`, how wide the next canvas of a request is."""
    diffusion_scheduler.diffusion_canvas_width = canvas_width


_stock_validate_diffusion = SamplingParams._validate_diffusion


def accept_all_sampling_params(architecture: str) -> None:
    """Lifts vLLM's refusal of sampling parameters for diffusion models of `architecture`; their
    values are checked as for any model. Repeatable."""

    def validate_diffusion(self: SamplingParams, model_config: ModelConfig) -> None:
        if model_config.architecture != architecture:
            _stock_validate_diffusion(self, model_config)

    SamplingParams._validate_diffusion = validate_diffusion


def has_triton() -> bool:
    return triton_utils.HAS_TRITON


_stock_use_v2_model_runner: Callable[[VllmConfig], bool] = VllmConfig.use_v2_model_runner.fget
_stock_validate_v2_model_runner = VllmConfig._validate_v2_model_runner
STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def allow_v2_runner_without_triton(prepare: Callable[[VllmConfig], None]) -> None:
    """Diffusion models and DFlash drafters get model runner v2, and `VLLM_USE_V2_MODEL_RUNNER=1` is
    honoured, although vLLM has no Triton; `prepare` then completes their configuration. Others keep
    vLLM's choice."""

    def use_v2_model_runner(self: VllmConfig) -> bool:
        is_diffusion = self.model_config is not None and self.model_config.is_diffusion
        speculative = self.speculative_config
        drafts_blocks = speculative is not None and speculative.method == "dflash"
        if (is_diffusion or drafts_blocks) and envs.VLLM_USE_V2_MODEL_RUNNER is None:
            return True
        return _stock_use_v2_model_runner(self)

    def validate_v2_model_runner(self: VllmConfig) -> None:
        with patch.object(vllm_config_module, "HAS_TRITON", True):
            _stock_validate_v2_model_runner(self)
        prepare(self)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)
    VllmConfig._validate_v2_model_runner = validate_v2_model_runner


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's stand-in for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules loaded from now on, and fills in the function of
    Triton that runner v2 calls and vLLM's stand-in lacks."""
    triton = triton_utils.triton
    assert isinstance(triton, TritonPlaceholder), "vLLM has Triton: its kernels can be launched"
    triton.jit = jit
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else n


def real_triton_module(placeholder: object) -> ModuleType | None:
    """The module of Triton that `placeholder` stands for, or None if it is something else."""
    if placeholder is triton_utils.tl:
        import triton.language as tl

        return tl
    if placeholder is triton_utils.tldevice:
        from triton.language.extra import libdevice

        return libdevice
    return None


def is_placeholder_constexpr(annotation: object) -> bool:
    """Whether `annotation` was written `tl.constexpr` in a module loaded without Triton."""
    tl = triton_utils.tl
    return isinstance(tl, TritonLanguagePlaceholder) and annotation is tl.constexpr
