"""What a GPU's memory keeps while a server sleeps.

At level 2 vLLM gives up whatever was allocated while the model was loaded, and loads the weights
anew. What is not a weight belongs to the pool that every level keeps.
"""

from contextlib import AbstractContextManager, nullcontext

from vllm.config import ModelConfig
from vllm.device_allocator import get_mem_allocator_instance


def kept_asleep(model_config: ModelConfig) -> AbstractContextManager[None]:
    """Tensors allocated in this context have the same values after a sleep, whatever its level."""
    if not model_config.enable_cumem_allocator:  # nor can the server sleep
        return nullcontext()
    return get_mem_allocator_instance().use_memory_pool(tag="runtime")
