"""How vLLM starts the processes of engines and workers on CPUs.

Imports vLLM in functions only: the first process of a server calls `engine_variables` before vLLM's
own modules may be imported.
"""

import multiprocessing.context
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_dllm.compat.patching import patch, temporarily_patch, wrap

MODULES = (
    "vllm.v1.worker.cpu_worker",  # must be imported first, as vLLM says there
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
"""Modules that engines and workers import."""

_OF_ENGINES = "v1.engine.utils:get_mp_context"

Context = Callable[[], multiprocessing.context.BaseContext]


def set_engine_context(context: Callable[[Any], Context | None]) -> None:
    """Patches vLLM to start engines in the multiprocessing context that `context(vllm_config)`
    makes. Where it returns None, vLLM's own is used. Repeatable."""

    @wrap("v1.engine.utils:CoreEngineProcManager.__init__")
    def init(stock: Any, self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        ours = context(vllm_config)
        with temporarily_patch(_OF_ENGINES, lambda own: ours or own):
            stock(self, *args, vllm_config=vllm_config, **kwargs)


def set_worker_context(context: Context) -> None:
    """Patches vLLM to start this engine's workers in the context that `context` makes.
    Repeatable."""
    patch("v1.executor.multiproc_executor:get_mp_context", lambda stock: context)


def worker_cores() -> list[int]:
    """Returns the ids of the cores that vLLM chose for this worker, from the variables that
    OpenMP's library reads when it is loaded. Empty if vLLM leaves the choice to the user."""
    from vllm import envs

    if envs.VLLM_CPU_OMP_THREADS_BIND == "nobind":
        return []
    listed = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")
    return [int(core) for core in listed.strip("{}").replace(",", " ").split()]


def engine_variables() -> dict[str, str]:
    """Returns the variables of the environment that vLLM sets when it starts a CPU engine."""
    return {
        "LD_PRELOAD": _preloaded_libraries(os.environ.get("LD_PRELOAD", "")),
        "NUMEXPR_MAX_THREADS": str(len(os.sched_getaffinity(0))),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    }


def _preloaded_libraries(already: str) -> str:
    """Returns the value of LD_PRELOAD with the paths of PyTorch's OpenMP library and vLLM's
    allocator added to `already`, as far as they exist and it names none of their kind."""
    libraries = [already] if already else []
    torch, vllm = (_folder(name) for name in ("torch", "vllm"))
    if not any(name in already for name in ("libomp", "libgomp", "libiomp")):
        found = [*(torch.parent / "torch.libs").glob("libgomp*.so*")]
        found += (torch / "lib").glob("libgomp*.so*")
        libraries += map(str, found[:1])
    if "libtcmalloc" not in already:
        found = [*(vllm / "libs").glob("libtcmalloc_minimal*.so*")]
        found += (vllm / "libs").glob("libtcmalloc.so*")
        libraries = [*map(str, found[:1]), *libraries]
    return ":".join(libraries)


def _folder(package: str) -> Path:
    """Returns the folder of an installed package, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
