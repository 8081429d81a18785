"""What a GPU's driver says of itself, and what its memory keeps while a server sleeps."""

from contextlib import AbstractContextManager, nullcontext

from vllm.config import ModelConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.utils.import_utils import import_pynvml


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
