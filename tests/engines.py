"""Engines of vLLM in the tests' own process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.distributed import cleanup_dist_env_and_memory


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
