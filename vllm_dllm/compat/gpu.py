"""What a GPU's driver says of itself, what its memory keeps while a server sleeps, and CUDA graphs
beside vLLM's own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml

T = TypeVar("T")
Capture = Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]]
"""Returns what a function launches as a graph, and what it returned: tensors that each replay
writes anew."""


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, or "" where there is none. Initializes no CUDA
    context."""
    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def kept_asleep(model_config: ModelConfig) -> AbstractContextManager[None]:
    """Tensors allocated in this context have the same values after a sleep, whatever its level. At
    level 2 vLLM gives up what was allocated while the model was loaded, and loads the weights anew;
    what is not a weight belongs to the pool that every level keeps."""
    if not model_config.enable_cumem_allocator:  # nor can the server sleep
        return nullcontext()
    return get_mem_allocator_instance().use_memory_pool(tag="runtime")


@contextmanager
def capturing(vllm_config: VllmConfig, device: torch.device) -> Iterator[Capture]:
    """Captures as vLLM captures forwards, into the same pool: what one graph uses only while it
    runs, others use, too. A function runs once before it is captured, so that what it needs is
    compiled."""

    from vllm.compilation.cudagraph_pool import capture_pool  # no CPU loads it
    from vllm.distributed.parallel_state import graph_capture

    def capture(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        run()
        graph = torch.cuda.CUDAGraph()
        with (
            capture_pool(current_platform.get_global_graph_pool(), vllm_config) as pool,
            torch.cuda.graph(graph, pool, stream=torch.cuda.current_stream()),
        ):
            made = run()
        return graph, made

    with graph_capture(device=device):
        yield capture
