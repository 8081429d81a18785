"""vLLM attention backends that know the window rules of `attention_kernels.masks`."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm import compat

logger = init_logger(__name__)


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
    """Whether `metadata_builder.build` takes `symmetric_window`, each request's window rule."""
    return getattr(metadata_builder, "takes_window_rules", False)
