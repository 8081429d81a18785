"""Where a server keeps the images that it has processed."""

from typing import Literal

from vllm.config import VllmConfig
from vllm.multimodal.cache import factories


def send_what_is_cached() -> None:
    """For diffusion models the API server keeps processed images, and sends them to the engine each
    time. Repeatable.

    vLLM's default keeps them in the engine, and only names in the API server. A request that is
    refused after its images were processed leaves names of images that the engine never got, and
    the next request with one of them is answered with HTTP 500.
    """
    stock_cache_type = factories._get_cache_type
    if stock_cache_type.__module__ == __name__:
        return

    def cache_type(vllm_config: VllmConfig) -> Literal[None, "processor_only", "lru", "shm"]:
        found = stock_cache_type(vllm_config)
        is_diffusion = vllm_config.model_config.is_diffusion
        return "processor_only" if is_diffusion and found == "lru" else found

    factories._get_cache_type = cache_type
