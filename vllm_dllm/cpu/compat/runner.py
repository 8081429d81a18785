"""Model runner v2 without Triton, and how it verifies drafts."""

from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import replace

STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def replace_rejection_sample(replacement: Callable[..., Any]) -> None:
    """Makes this process verify drafts with `replacement`. Repeatable."""

    def without_fly(*args: Any, fly_window_size: int = 0, **kwargs: Any) -> Any:
        """0.33 passes the settings of FLY with every call; a window of 0 turns it off."""
        if fly_window_size > 0:
            return stock_rejection_sample(*args, fly_window_size=fly_window_size, **kwargs)
        fly = ("fly_entropy_threshold", "fly_entropy_top_k")
        return replacement(*args, **{key: kwargs[key] for key in kwargs.keys() - set(fly)})

    ours = without_fly if version.is_at_least("0.33") else replacement
    replace("v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample", lambda stock: ours)


def stock_rejection_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    return rejection_sampler_utils.rejection_sample(*args, **kwargs)


def allow_v2_worker_without_triton() -> None:
    """Lets this process make a worker of `allow_v2_runner_without_triton`: from 0.33 on the worker
    asks for Triton by itself. Repeatable."""
    if version.is_at_least("0.33"):
        replace("v1.worker.gpu_worker:HAS_TRITON", lambda stock: True)


def allow_v2_runner_without_triton(prepare: Callable[[VllmConfig], None]) -> None:
    """Diffusion models and DFlash drafters get model runner v2, and `VLLM_USE_V2_MODEL_RUNNER=1` is
    honoured, although vLLM has no Triton; `prepare` then completes their configuration. Others keep
    vLLM's choice. Repeatable."""

    def make_choice(stock: property) -> property:
        def use_v2_model_runner(self: VllmConfig) -> bool:
            is_diffusion = self.model_config is not None and self.model_config.is_diffusion
            speculative = self.speculative_config
            drafts_blocks = speculative is not None and speculative.method == "dflash"
            if (is_diffusion or drafts_blocks) and envs.VLLM_USE_V2_MODEL_RUNNER is None:
                return True
            return bool(stock.__get__(self))

        return property(use_v2_model_runner)

    def validate_v2_model_runner(self: VllmConfig) -> None:
        """Does what vLLM does, but asks for no Triton."""
        if unsupported := self._get_v2_model_runner_unsupported_features():
            raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
        prepare(self)

    replace("config.vllm:VllmConfig.use_v2_model_runner", make_choice)
    replace(
        "config.vllm:VllmConfig._validate_v2_model_runner", lambda stock: validate_v2_model_runner
    )
