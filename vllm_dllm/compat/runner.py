"""Model runner v2: what it takes for a prefill, how it scores prompts and verifies drafts, and that
it runs without Triton."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import vllm.config.vllm as vllm_config_module
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_dllm.compat import version


@torch.inference_mode()
def prefill_emitted_tokens(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Makes all tokens that the scheduler knows of their requests' prefill, emitted ones too: those
    that are not computed yet are read from the request, like a prompt. For a worker that is about
    to run `scheduler_output`, and schedulers that do not run ahead of the tokens."""
    cached = scheduler_output.scheduled_cached_reqs
    if cached.req_ids and getattr(runner.sampler, "prefills_emitted_tokens", False):
        states = runner.req_states
        slots = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
        prompts = states.prompt_len.np[slots]
        states.prefill_len.np[slots] = prompts + np.array(cached.num_output_tokens)
        states.prefill_len.copy_to_uva()


def send_numbers(runner: Any, output: Any) -> Any:
    """`output` of a worker's step, and with it the numbers that the sampler has of that step, if it
    counts. They may still be on their way from the device, ahead of the tokens."""
    take_numbers = getattr(runner.sampler, "take_numbers", None)
    if take_numbers is not None and isinstance(output, AsyncModelRunnerOutput):
        output.model_runner_output.canvas_numbers = take_numbers()
    return output


def numbers_of(output: ModelRunnerOutput) -> Any:
    """What `send_numbers` sent with it, if it did."""
    return getattr(output, "canvas_numbers", None)


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

    def without_fly(*args: Any, fly_window_size: int = 0, **kwargs: Any) -> Any:
        """0.33 passes the settings of FLY with every call; a window of 0 turns it off."""
        if fly_window_size > 0:
            return stock_rejection_sample(*args, fly_window_size=fly_window_size, **kwargs)
        fly = ("fly_entropy_threshold", "fly_entropy_top_k")
        return replacement(*args, **{key: kwargs[key] for key in kwargs.keys() - set(fly)})

    knows_fly = version.is_at_least("0.33")
    rejection_sampler.rejection_sample = without_fly if knows_fly else replacement


def stock_rejection_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    return rejection_sampler_utils.rejection_sample(*args, **kwargs)


def allow_v2_worker_without_triton() -> None:
    """In a process that is about to make a worker of `allow_v2_runner_without_triton`: from 0.33 on
    the worker asks for Triton by itself. Repeatable."""
    if version.is_at_least("0.33"):
        from vllm.v1.worker import gpu_worker  # made this process' worker

        gpu_worker.HAS_TRITON = True


STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


_stock_use_v2_model_runner: Callable[[VllmConfig], bool] = VllmConfig.use_v2_model_runner.fget


_stock_validate_v2_model_runner = VllmConfig._validate_v2_model_runner


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
        has_triton = vllm_config_module.HAS_TRITON
        vllm_config_module.HAS_TRITON = True
        try:
            _stock_validate_v2_model_runner(self)
        finally:
            vllm_config_module.HAS_TRITON = has_triton
        prepare(self)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)
    VllmConfig._validate_v2_model_runner = validate_v2_model_runner
