"""How vLLM starts the processes of engines and workers on CPUs.

Imports vLLM in functions only: the first process of a server asks for `variables` before vLLM's
own modules may be imported.
"""

import multiprocessing.context
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_dllm.compat.patching import patch, temporarily_patch

MODULES = (
    "vllm.v1.worker.cpu_worker",  # first, as it says of itself
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
"""What engines and workers import."""

_OF_ENGINES = "v1.engine.utils:get_mp_context"

Context = Callable[[], multiprocessing.context.BaseContext]


def start_engines(context: Callable[[Any], Context | None]) -> None:
    """The engine of a VllmConfig starts in the context that `context` returns for it; None leaves
    it to vLLM. Repeatable."""

    def make(stock: Any) -> Any:
        def init(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
            ours = context(vllm_config)
            with temporarily_patch(_OF_ENGINES, lambda own: ours or own):
                stock(self, *args, vllm_config=vllm_config, **kwargs)

        return init

    patch("v1.engine.utils:CoreEngineProcManager.__init__", make)


def start_workers(context: Context) -> None:
    """The workers of this engine start in this context. Repeatable."""
    patch("v1.executor.multiproc_executor:get_mp_context", lambda stock: context)


def worker_cores() -> list[int]:
    """The cores that vLLM chose for this worker, in the environment that OpenMP's library reads
    when it is loaded; empty if it leaves the choice to the user."""
    from vllm import envs

    if envs.VLLM_CPU_OMP_THREADS_BIND == "nobind":
        return []
    listed = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")
    return [int(core) for core in listed.strip("{}").replace(",", " ").split()]


def variables() -> dict[str, str]:
    """What vLLM will have added to the environment of a CPU engine when it starts one."""
    return {
        "LD_PRELOAD": _preloaded_libraries(os.environ.get("LD_PRELOAD", "")),
        "NUMEXPR_MAX_THREADS": str(len(os.sched_getaffinity(0))),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    }


def _preloaded_libraries(already: str) -> str:
    """PyTorch's OpenMP library and vLLM's allocator, if their packages have them."""
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
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


AWAKE_SECONDS = 0.02
"""How long an engine and its workers ask for each other's next message without a pause. A step of
the shipped model takes 10 ms, and its answer is awaited awake: asleep from the start, vLLM's
readers miss messages, because ZeroMQ drops the second of two calls within about a millisecond."""


def fall_asleep_soon() -> None:
    """Lets readers of this process sleep, whose engine shares few cores. vLLM's stay awake
    for a second after each message, and where all cores compute, that is taken from the model: 12
    to 20% of a step of 267 million parameters on two cores. Repeatable."""

    def make(stock: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            stock(self, *args, **kwargs)
            self.busy_loop_s = min(self.busy_loop_s, AWAKE_SECONDS)

        return init

    patch("distributed.device_communicators.shm_broadcast:SpinCondition.__init__", make)
