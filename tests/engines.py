"""Engines of vLLM in the process that starts them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform


@contextmanager
def in_this_process() -> Iterator[None]:
    """An engine started inside takes no processes of its own, which would import torch and vLLM for
    20 s. At the end the process is ready for another one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM's worker forbids it from then on.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        # vLLM looks for garbage eight times a start; none of what was imported is.
        gc.freeze()
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
            # What an engine that is not compiled leaves to its workers is not for the next engine.
            os.environ.pop("VLLM_USE_AOT_COMPILE", None)


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
