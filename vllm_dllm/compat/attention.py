"""Which attention backend vLLM uses, the kernels of its CPU backend, its FlashAttention-4, and how
its BailingMoeV2 routes tokens to experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_dllm.compat.patching import temporarily_patch


@contextmanager
def override_cpu_attention_backend(class_path: str) -> Iterator[None]:
    """Makes attention layers that are built in this context use `class_path` where vLLM picks its
    CPU backend. Clears vLLM's cache of backends that it has picked, on entry and on exit."""
    backend = AttentionBackendEnum.CPU_ATTN
    register_backend(backend, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def register_custom_attention_backend(class_path: str) -> None:
    """Registers `class_path` as `--attention-backend CUSTOM`, the only name that vLLM leaves to
    extensions in all of its processes. Does nothing if a class has that name already."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, class_path)


def custom_attention_backend(class_path: str) -> AttentionBackendEnum | None:
    """Returns CUSTOM if `class_path` is registered by that name, else None."""
    custom = AttentionBackendEnum.CUSTOM
    return custom if custom.is_overridden() and custom.get_path() == class_path else None


def kv_cache_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factors, [1] fp32 each, by which a layer multiplies cached keys and values."""
    return layer._k_scale.view(1), layer._v_scale.view(1)


def set_kernel_isa(metadata_builder: Any, isa: str, layer_names: list[str]) -> None:
    """Makes a CPU's metadata builder and the layers `layer_names` use the kernels for `isa`. "vec"
    runs on every x86 processor; "amx" is vLLM's choice for bf16 where the processor has it. The two
    lay out the cache differently, so call this before anything is cached."""
    metadata_builder.isa = isa
    metadata_builder._set_isa_to_layers(layer_names)


def flash_attention_4() -> Callable[..., Any]:
    """Returns vLLM's `flash_attn_varlen_func` for FlashAttention-4, which on Hopper also takes a
    causal flag per request and head sizes up to 512.

    FlashAttention-4's compile key does not tell a kernel with a fixed causal flag from one with a
    flag per request. So a process must use only one of the two for a head size, a ratio of heads
    and a window.

    Raises:
        ImportError: FlashAttention-4 cannot run here; the message says why.
    """
    from vllm.vllm_flash_attn import (
        fa_version_unsupported_reason,
        flash_attn_varlen_func,
        is_fa_version_supported,
    )

    if not is_fa_version_supported(4):
        raise ImportError(fa_version_unsupported_reason(4))
    return partial(flash_attn_varlen_func, fa_version=4)


@contextmanager
def use_routing_function(choose: Callable[..., Any]) -> Iterator[None]:
    """Makes layers that are built in this context route tokens by `choose`, which gets the
    arguments of vLLM's `custom_routing_function` and, as `bias`, the layer's bias."""

    def make_factory(stock: Any) -> Any:
        def make_experts(*, e_score_correction_bias: torch.Tensor, **options: Any) -> Any:
            options |= {
                "custom_routing_function": partial(choose, bias=e_score_correction_bias),
                "use_grouped_topk": False,
                "num_expert_group": None,
                "topk_group": None,
            }
            return stock(**options)

        return make_experts

    with temporarily_patch("model_executor.models.bailing_moe:FusedMoEFactory", make_factory):
        yield
