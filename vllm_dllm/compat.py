"""Every name that vLLM keeps private and this project needs. Written against vLLM 0.32.0.

`tests/test_compat.py` fails loudly when one of them moves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.engine import input_processor


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


def set_request_check(check: Callable[..., Any]) -> None:
    """Replaces vLLM's admission check of diffusion requests, `validate_diffusion_sampling_params`,
    by `check`, of the same signature."""
    input_processor.validate_diffusion_sampling_params = check
