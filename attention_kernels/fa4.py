"""Imports FlashAttention-4, which is an optional package."""

import importlib
from types import ModuleType


def import_fa4() -> ModuleType:
    """Returns the module `fa4_fwd`. Raises ImportError, which says what to install, if
    FlashAttention-4 is missing."""
    try:
        importlib.import_module("flash_attn.cute.interface")
        return importlib.import_module("attention_kernels.fa4_fwd")
    except ImportError as error:
        raise ImportError(
            f"FlashAttention-4 needs the package flash-attn-4 ({error}). Install the extra fa4 "
            f"(pip install 'vllm-dllm[fa4]') or leave out FlashAttention-4."
        ) from error
