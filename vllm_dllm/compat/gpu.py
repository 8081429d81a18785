"""NVIDIA's driver version, memory that survives a server's sleep, and graphs in vLLM's pool."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml

Capture = Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]]
"""Captures what a function launches. Returns the graph and the tensors that each replay
overwrites."""


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, or "" if there is none. Makes no CUDA context."""
    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def keep_during_sleep(model_config: ModelConfig) -> AbstractContextManager[None]:
    """Returns a context in which allocated tensors keep their values during a sleep of any level.
    At level 2 vLLM discards what was allocated while the model was loaded, and loads the weights
    again. The context does nothing if the server cannot sleep."""
    if not model_config.enable_cumem_allocator:  # nor can the server sleep
        return nullcontext()
    return get_mem_allocator_instance().use_memory_pool(tag="runtime")


@contextmanager
def capture_graphs(vllm_config: VllmConfig, device: torch.device) -> Iterator[Capture]:
    """Yields a function that runs its argument once, which compiles kernels, and then captures it
    as a CUDA graph in vLLM's memory pool. Graphs of the pool must not run at once."""
    from vllm.compilation.cudagraph_pool import capture_pool  # no CPU loads it
    from vllm.distributed.parallel_state import graph_capture

    def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        run()  # compiles kernels
        graph = torch.cuda.CUDAGraph()
        with (
            capture_pool(current_platform.get_global_graph_pool(), vllm_config) as pool,
            torch.cuda.graph(graph, pool, stream=torch.cuda.current_stream()),
        ):
            made = run()
        return graph, made

    with graph_capture(device=device):
        yield capture
