"""vLLM's cache of compiled models. Loaded in workers alone: it loads much."""

import os
from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from vllm.compilation import decorators

_stock_model_hash_key = decorators._model_hash_key
_stock_try_load = decorators._try_load_aot_compiled_fn


def load_what_inductor_compiled() -> None:
    """vLLM stores every compiled model, and can load those that its own backend compiled. On CPUs
    torch's Inductor compiles the model in one piece; what torch stores of that is complete once it
    is read, but lacks the method by which vLLM completes its own. Repeatable."""

    def finalize_loading(self: object, vllm_config: object) -> None:
        pass

    BundledAOTAutogradSerializableCallable.finalize_loading = finalize_loading


def add_to_cache_key(key_part: Callable[[], str]) -> None:
    """A compiled model is loaded only where `key_part` returns what it did at its compilation.
    Repeatable."""

    def model_hash_key(fn: Callable[..., Any]) -> str:
        return f"{_stock_model_hash_key(fn)} {key_part()}"

    decorators._model_hash_key = model_hash_key


def announce_compilation(announce: Callable[[str, str], None]) -> None:
    """`announce` learns that a model is about to be compiled: the name of its class, and the folder
    where vLLM will look for the result next time. Repeatable."""

    def try_load(model: Any, path: str) -> Any:
        found = _stock_try_load(model, path)
        if found is None:
            announce(type(model).__name__, os.path.dirname(path))
        return found

    decorators._try_load_aot_compiled_fn = try_load
