"""Model runner v2 on CPUs: allowed without Triton, with a `triton.jit` of ours, with verification
of drafts by our own function, and with vLLM's cache of compiled models."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import vllm.triton_utils as triton_utils
from vllm import envs
from vllm.config import VllmConfig
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

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


def draft_seeds(
    seeds: torch.Tensor,  # [num_rows] int64
    columns: torch.Tensor,  # [num_rows] int64, of which drafted position the row's logits are kept
) -> torch.Tensor:
    """Returns the seeds [num_rows] int64 of the noise that drafts are drawn with. From vLLM 0.33
    on, each drafted position has a seed of its own."""
    return seeds ^ (columns << 32) if version.is_at_least("0.33") else seeds


def has_triton() -> bool:
    """Whether vLLM can launch Triton kernels in this process."""
    return triton_utils.HAS_TRITON


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's placeholder for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules that are loaded later, and adds `next_power_of_2`,
    which vLLM's placeholder lacks. Repeatable. Must not be called where vLLM has Triton."""
    assert isinstance(triton_utils.triton, TritonPlaceholder), "vLLM has Triton, which can launch"
    patch("triton_utils:triton.jit", lambda stock: jit)
    patch(
        "triton_utils:triton.next_power_of_2",
        lambda stock: lambda n: 1 << (n - 1).bit_length() if n > 0 else n,
    )


def real_triton_module(placeholder: object) -> ModuleType | None:
    """Returns the module of Triton that `placeholder` stands for, None for other objects."""
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


def allow_loading_inductor_models() -> None:
    """Lets vLLM load models that torch's Inductor compiled in one piece, as on CPUs. Those are
    complete when they are read, and lack the method by which vLLM completes its own backend's:
    gives their class one that does nothing. Repeatable."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable  # loads much

    def finalize_loading(self: object, vllm_config: object) -> None:
        pass

    BundledAOTAutogradSerializableCallable.finalize_loading = finalize_loading


def add_to_cache_key(vllm_config: VllmConfig, key_part: str) -> None:
    """Adds `key_part` to vLLM's cache key of compiled models. Changes the additional configuration
    in `vllm_config`, in place, which that key includes."""
    additional = dict(vllm_config.additional_config or {})
    vllm_config.additional_config = {**additional, "vllm_dllm_compiled_with": key_part}


def set_compilation_callback(announce: Callable[[str, str], None]) -> None:
    """Patches vLLM's loading of compiled models: calls `announce(model_class, folder)` before a
    model is compiled. vLLM will look for the result in `folder` next time. Repeatable."""

    @wrap("compilation.decorators:_try_load_aot_compiled_fn")
    def try_load(stock: Any, model: Any, aot_compilation_path: str) -> Any:
        found = stock(model, aot_compilation_path)
        if found is None:
            announce(type(model).__name__, os.path.dirname(aot_compilation_path))
        return found
