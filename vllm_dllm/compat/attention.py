"""Which attention backend vLLM takes, and its copy of FlashAttention-4."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


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


def cache_scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What an attention layer's cached keys and values are multiplied with when read: [1] fp32
    each."""
    return layer._k_scale.view(1), layer._v_scale.view(1)


def set_kernel_isa(metadata_builder: Any, isa: str, layer_names: list[str]) -> None:
    """Has a CPU's metadata builder and its layers use the kernels for `isa`: "vec" runs on every
    x86 processor, "amx" is what vLLM takes for bf16 where it can. The two lay out the cache
    differently, so this comes before anything is cached."""
    metadata_builder.isa = isa
    metadata_builder._set_isa_to_layers(layer_names)


def flash_attention_4() -> Callable[..., Any]:
    """vLLM's function of this name, which on Hopper also takes a causal flag per request and head
    sizes up to 512. Raises ImportError that says why it is not there.

    A kernel compiled for a fixed flag is taken for one with a flag per request: FlashAttention-4's
    compile key does not tell them apart. So a process must ask for one of them alone, for a head
    size, a ratio of heads and a window.
    """
    from vllm.vllm_flash_attn import (
        fa_version_unsupported_reason,
        flash_attn_varlen_func,
        is_fa_version_supported,
    )

    if not is_fa_version_supported(4):
        raise ImportError(fa_version_unsupported_reason(4))
    return partial(flash_attn_varlen_func, fa_version=4)
