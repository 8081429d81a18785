"""Model runner v2 on CPUs: allowed without Triton, with verification of drafts by our own
function."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig

from vllm_dllm.compat import version
from vllm_dllm.compat.drafting import has_dflash_method
from vllm_dllm.compat.patching import patch, wrap

STOCK_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def replace_rejection_sample(replacement: Callable[..., Any]) -> None:
    """Patches vLLM so that this process verifies drafts with `replacement`. It gets vLLM's
    arguments up to `num_speculative_steps`, and `use_fp64`. Where a call sets others, vLLM's own
    function runs, in Triton's interpreter. Repeatable."""

    @wrap("v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample")
    def rejection_sample(stock: Any, *args: Any, use_fp64: bool = False, **options: Any) -> Any:
        *plain, synthetic_rates = args
        is_plain = (
            synthetic_rates is None
            and not options.get("use_block_verification")
            and not options.get("fly_window_size")
            and options.get("contexts") is None  # watermarking
        )
        if is_plain:
            return replacement(*plain, use_fp64)
        return stock(*args, use_fp64=use_fp64, **options)


def allow_v2_worker_without_triton() -> None:
    """Lets this process make a worker of runner v2 without Triton, which vLLM 0.33 checks.
    Repeatable."""
    if version.is_at_least("0.33"):
        patch("v1.worker.gpu_worker:HAS_TRITON", lambda stock: True)


def allow_v2_runner_without_triton(prepare: Callable[[VllmConfig], None]) -> None:
    """Patches vLLM to run diffusion models and targets of DFlash drafters by model runner v2,
    although there is no Triton, and to obey `VLLM_USE_V2_MODEL_RUNNER`. Other models keep vLLM's
    choice. Repeatable.

    `prepare` is called with each configuration that uses runner v2, and may change it in place."""

    def make_choice(stock: property) -> property:
        """Returns vLLM's property `stock`, except that it is true for our models."""

        def use_v2_model_runner(self: VllmConfig) -> bool:
            is_diffusion = self.model_config is not None and self.model_config.is_diffusion
            is_ours = is_diffusion or has_dflash_method(self.speculative_config)
            if is_ours and envs.VLLM_USE_V2_MODEL_RUNNER is None:
                return True
            return bool(stock.__get__(self))

        return property(use_v2_model_runner)

    def validate(self: VllmConfig) -> None:
        """Prepares the configuration. Raises ValueError for what vLLM refuses, but for no
        Triton."""
        if unsupported := self._get_v2_model_runner_unsupported_features():
            raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
        prepare(self)

    patch("config.vllm:VllmConfig.use_v2_model_runner", make_choice)
    patch("config.vllm:VllmConfig._validate_v2_model_runner", lambda stock: validate)
