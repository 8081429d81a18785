"""vLLM's copy of FlashAttention-4, which its CUDA build brings along."""

from collections.abc import Callable
from functools import partial
from typing import Any


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
