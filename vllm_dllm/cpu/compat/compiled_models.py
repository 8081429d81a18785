"""vLLM's cache of compiled models. Only workers import this: it loads much."""

import os
from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from vllm.config import VllmConfig

from vllm_dllm.compat.patching import wrap


def allow_loading_inductor_models() -> None:
    """Lets vLLM load models that torch's Inductor compiled in one piece, as on CPUs. Those are
    complete when they are read, and lack the method by which vLLM completes its own backend's:
    gives their class one that does nothing. Repeatable."""

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
