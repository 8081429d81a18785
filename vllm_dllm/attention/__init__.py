"""vLLM attention backends that know the window rules of `attention_kernels.masks`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm import compat

logger = init_logger(__name__)


@dataclass(frozen=True)
class WindowRules:
    """What a step's metadata builders need beside vLLM's own arguments."""

    symmetric: torch.Tensor | None = None  # [num_reqs] int32, 1 = symmetric rule, 0 = reference
    shared: dict[Any, Any] = field(default_factory=dict)  # what one KV cache group leaves the next


@contextmanager
def use_window_rules() -> Iterator[None]:
    """Attention layers built inside get a backend that applies the reference window rule.

    Scoped to one model's construction: other models of the process keep vLLM's own backends.
    """
    if not current_platform.is_cpu():
        logger.warning_once(
            "Sliding-window layers use vLLM's own attention backend on this device. It masks "
            "canvas rows by distance (|q-k| < window), where the reference lets each row see the "
            "last window-1 prefix tokens and the whole canvas: prompts longer than the window "
            "are decoded differently from the reference."
        )
        yield
        return
    with compat.override_cpu_attention_backend("vllm_dllm.attention.cpu.CpuCanvasBackend"):
        yield


def takes_window_rules(metadata_builder: object) -> bool:
    """Whether `metadata_builder.build` takes `window_rules`, a `WindowRules`."""
    return getattr(metadata_builder, "takes_window_rules", False)
