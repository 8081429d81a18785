"""vLLM attention backends that know the window rules of `attention_kernels.masks`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import envs
from vllm.config import AttentionConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attention_kernels.support import FIRST_FP8_CAPABILITY
from vllm_dllm.compat import attention as vllm_attention

logger = init_logger(__name__)

CPU_BACKEND = "vllm_dllm.cpu.attention.backend.CpuCanvasBackend"
GPU_BACKEND = "vllm_dllm.attention.gpu.GpuCanvasBackend"


@dataclass(frozen=True)
class WindowRules:
    """What a step's metadata builders need besides vLLM's own arguments.

    `spans` holds, for each query row of the batch, the first key and the end of the keys of the
    image that the row belongs to, as positions in its request; (0, 0) for any other row. It is None
    if no row of the step belongs to an image. `DiffusionModelState.image_spans` provides it, in a
    buffer whose address does not change, and the builders pass it on to all layers.

    Images are whole: their keys end within the request, and on layers with a window none lies
    further back than the window of the request's first row.
    """

    symmetric: torch.Tensor | None = None  # [num_reqs] int32, 1 = symmetric rule, 0 = reference
    spans: torch.Tensor | None = None  # [num_tokens, 2] int32
    by_blocks: bool = False  # whether requests may be causal by blocks of more than one token
    shared: dict[Any, Any] = field(default_factory=dict)  # passed on between KV cache groups


def gpu_backend(vllm_config: VllmConfig) -> AttentionBackendEnum | None:
    """Returns vLLM's name for our GPU attention. Returns None if it does not support this GPU or
    type of cache, if batch invariance is asked for, or if another extension has taken the name."""
    name = vllm_attention.custom_attention_backend(GPU_BACKEND)
    if name is None or not current_platform.is_cuda():
        return None
    backend, capability = name.get_class(), current_platform.get_device_capability()
    cache_dtype = vllm_config.cache_config.cache_dtype
    usable = (
        capability is not None
        and backend.supports_compute_capability(capability)
        and backend.supports_kv_cache_dtype(cache_dtype)
        and not (cache_dtype.startswith("fp8") and tuple(capability) < FIRST_FP8_CAPABILITY)
        and not envs.VLLM_BATCH_INVARIANT
    )
    return name if usable else None


@contextmanager
def use_window_rules(attention_config: AttentionConfig) -> Iterator[None]:
    """Makes attention layers that are built in this context know the window rules. On a GPU they do
    unless a stock backend was chosen: a warning then says what that means.

    It covers one model's construction: other models of the process keep vLLM's own backends.
    """
    if current_platform.is_cpu():
        with vllm_attention.override_cpu_attention_backend(CPU_BACKEND):
            yield
        return
    backend = attention_config.backend
    if backend is None or backend != vllm_attention.custom_attention_backend(GPU_BACKEND):
        logger.warning_once(
            "Sliding-window layers run attention backend %s, which only knows the window rule "
            "'symmetric', so diffusion_window_rule and the server's default have no effect: it "
            "masks canvas rows by distance (|q-k| < window), while 'reference' lets each row see "
            "the last window-1 prefix tokens and the whole canvas. Prompts longer than the window "
            "are decoded differently from the reference. Leave out --attention-backend to decode "
            "as the reference does.",
            backend.name if backend is not None else "of vLLM's choice",
        )
    yield


def takes_window_rules(metadata_builder: object) -> bool:
    """Returns whether `metadata_builder.build` takes `window_rules`, a `WindowRules`."""
    return getattr(metadata_builder, "takes_window_rules", False)
