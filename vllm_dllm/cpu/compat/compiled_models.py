"""vLLM's cache of compiled models. Loaded in workers alone: it loads much."""

import os
from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from vllm.config import VllmConfig

from vllm_dllm.compat.patching import patch


def load_what_inductor_compiled() -> None:
    """vLLM stores every compiled model, and can load those that its own backend compiled. On CPUs
    torch's Inductor compiles the model in one piece; what torch stores of that is complete once it
    is read, but lacks the method by which vLLM completes its own. Repeatable."""

    def finalize_loading(self: object, vllm_config: object) -> None:
        pass

    BundledAOTAutogradSerializableCallable.finalize_loading = finalize_loading


def add_to_cache_key(vllm_config: VllmConfig, key_part: str) -> None:
    """A compiled model is loaded only where this worker's `key_part` is what it was at its
    compilation: vLLM's key has all of the additional configuration."""
    additional = dict(vllm_config.additional_config or {})
    vllm_config.additional_config = {**additional, "vllm_dllm_compiled_with": key_part}


def announce_compilation(announce: Callable[[str, str], None]) -> None:
    """`announce` learns that a model is about to be compiled: the name of its class, and the folder
    where vLLM will look for the result next time. Repeatable."""

    def make(stock: Any) -> Any:
        def try_load(model: Any, path: str) -> Any:
            found = stock(model, path)
            if found is None:
                announce(type(model).__name__, os.path.dirname(path))
            return found

        return try_load

    patch("compilation.decorators:_try_load_aot_compiled_fn", make)
