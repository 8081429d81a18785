"""Engines of vLLM in the process that starts them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher


@contextmanager
def in_this_process() -> Iterator[None]:
    """An engine started inside takes no processes of its own, which would import torch and vLLM for
    20 s. At the end the process is ready for another one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM's worker forbids it from then on.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        # vLLM looks for garbage eight times a start and twice at its end; none of what is there now
        # is. It must stay frozen, which vLLM undoes, and of the engine nothing may be.
        gc.collect()
        gc.freeze()
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        if dispatcher._registry:  # of an earlier engine, for good; looking for copies takes 0.4 s
            platform = type(current_platform)
            nothing = staticmethod(lambda: None)
            patch.setattr(platform, "register_triton_kernel_overrides", nothing)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
            # What an engine that is not compiled leaves to its workers is not for the next engine.
            os.environ.pop("VLLM_USE_AOT_COMPILE", None)


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """vLLM's process group, of this process alone: layers ask for their tensor-parallel rank when
    they are built. `folder` gets a file of it."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        initialize_model_parallel()
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Engines of two workers started inside have a core for each. The workers fork, as those of a
    server do, from a process that has imported vLLM."""
    from vllm.v1.executor import multiproc_executor

    from vllm_dllm.config.workers import CPU_IMPORTS
    from vllm_dllm.cpu import fork_server
    from vllm_dllm.cpu.compat import engine_processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        fork_server.ensure_running((*engine_processes.MODULES, *CPU_IMPORTS))
        patch.setattr(multiproc_executor, "get_mp_context", fork_server.ForkContext)
        yield


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines started inside may schedule asynchronously, what GPUs do by default: a step is
    scheduled before the last one's tokens are known. vLLM turns it off on CPUs; the code is the
    same."""
    check_and_update_config = type(current_platform).check_and_update_config

    def keep_async_scheduling(vllm_config: VllmConfig) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(current_platform), "check_and_update_config", staticmethod(keep_async_scheduling)
        )
        yield
