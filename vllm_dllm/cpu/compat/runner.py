"""Model runner v2 without Triton: its stand-in, what differs in its kernels between the known
versions, and how it verifies drafts.

Native kernels take the arguments of the newest. What a version adds at the end is left out by older
ones; at the end of this file is the rest.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import vllm.triton_utils as triton_utils
from vllm import envs
from vllm.config import VllmConfig
from vllm.triton_utils.importing import TritonLanguagePlaceholder, TritonPlaceholder

from vllm_dllm.compat import version
from vllm_dllm.compat.patching import patch

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
    patch("v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample", lambda stock: ours)


def stock_rejection_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    return rejection_sampler_utils.rejection_sample(*args, **kwargs)


def allow_v2_worker_without_triton() -> None:
    """Lets this process make a worker of `allow_v2_runner_without_triton`: from 0.33 on the worker
    asks for Triton by itself. Repeatable."""
    if version.is_at_least("0.33"):
        patch("v1.worker.gpu_worker:HAS_TRITON", lambda stock: True)


def allow_v2_runner_without_triton(prepare: Callable[[VllmConfig], None]) -> None:
    """Diffusion models and DFlash drafters get model runner v2, and `VLLM_USE_V2_MODEL_RUNNER=1` is
    honoured, although vLLM has no Triton; `prepare` then completes their configuration. Others keep
    vLLM's choice. Repeatable."""

    def make_choice(stock: property) -> property:
        def use_v2_model_runner(self: VllmConfig) -> bool:
            is_diffusion = self.model_config is not None and self.model_config.is_diffusion
            speculative = self.speculative_config
            has_dflash_method = speculative is not None and speculative.method == "dflash"
            if (is_diffusion or has_dflash_method) and envs.VLLM_USE_V2_MODEL_RUNNER is None:
                return True
            return bool(stock.__get__(self))

        return property(use_v2_model_runner)

    def validate_v2_model_runner(self: VllmConfig) -> None:
        """Does what vLLM does, but asks for no Triton."""
        if unsupported := self._get_v2_model_runner_unsupported_features():
            raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
        prepare(self)

    patch("config.vllm:VllmConfig.use_v2_model_runner", make_choice)
    patch(
        "config.vllm:VllmConfig._validate_v2_model_runner", lambda stock: validate_v2_model_runner
    )


def has_triton() -> bool:
    return triton_utils.HAS_TRITON


def uses_triton_placeholder(module: ModuleType) -> bool:
    """Whether `module` was loaded with vLLM's stand-in for Triton."""
    return any(isinstance(value, TritonPlaceholder) for value in vars(module).values())


def set_triton_jit(jit: Callable[..., Any]) -> None:
    """Makes `jit` the `@triton.jit` of modules loaded from now on, and fills in the function of
    Triton that runner v2 calls and vLLM's stand-in lacks."""
    is_stand_in = isinstance(triton_utils.triton, TritonPlaceholder)
    assert is_stand_in, "vLLM has Triton: its kernels can be launched"
    patch("triton_utils:triton.jit", lambda stock: jit)
    patch(
        "triton_utils:triton.next_power_of_2",
        lambda stock: lambda n: 1 << (n - 1).bit_length() if n > 0 else n,
    )


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


def dflash_inputs(native: Callable[..., None], vllm_version: str) -> Callable[..., None]:
    """Leaves out which rows of a batch of drafts are padding, before 0.33 asks for it."""
    if version.is_at_least("0.33", vllm_version):
        return native

    @wraps(native)
    def without_padding(
        grid: tuple[int, ...], ids: Any, positions: Any, *others: Any, **options: Any
    ) -> None:
        native(grid, ids, positions, None, *others, **options)

    own = inspect.signature(native)
    kept = [p for p in own.parameters.values() if p.name != "out_is_padding"]
    without_padding.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    return without_padding


def draft_seeds(
    seeds: torch.Tensor,  # [num_rows] int64
    columns: torch.Tensor,  # [num_rows] int64, of which drafted position the row's logits are kept
) -> torch.Tensor:
    """What the noise of drafts is drawn with: from 0.33 on each position has a seed of its own."""
    return seeds ^ (columns << 32) if version.is_at_least("0.33") else seeds
