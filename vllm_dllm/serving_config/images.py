"""Prepares a server of images, or serves text alone where images cannot be served."""

from typing import Any

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from vllm_dllm.attention import gpu_backend

logger = init_logger(__name__)

PROCESSOR_ONLY: Any = "processor_only"
"""vLLM's name of a cache of processed images that only the API server has."""


def prepare_images(vllm_config: VllmConfig) -> None:
    """Adjusts `vllm_config`, in place, for requests with images. A step gets room for a whole
    image, or a whole frame of a video, which the scheduler does not cut. Also limits what this
    process reads from image bytes.

    Where images cannot be served, leaves out the vision tower and logs why.
    """
    # Not for the start of other servers.
    from vllm_dllm.requests.media_bytes import use_careful_connector

    config, mm_config = vllm_config.scheduler_config, vllm_config.model_config.multimodal_config
    assert mm_config is not None
    info = MULTIMODAL_REGISTRY.get_processing_info(vllm_config.model_config)
    num_tokens = info.most_tokens_in_one_piece
    if obstacle := find_image_obstacle(vllm_config, num_tokens):
        mm_config.language_model_only = True
        logger.warning("Images are refused, and only text is served: %s", obstacle)
        return
    if 0 < config.long_prefill_token_threshold < num_tokens:
        config.long_prefill_token_threshold = num_tokens
    if mm_config.mm_processor_cache_type == "lru":
        # vLLM's default keeps processed images in the engine, and only names in the API server. A
        # request that is refused after its images were processed leaves names of images that the
        # engine never got, and the next request with one of them is answered with HTTP 500
        # (`docs/upstream/refused-images.md`). So the API server keeps them.
        mm_config.mm_processor_cache_type = PROCESSOR_ONLY
    use_careful_connector()


def find_image_obstacle(vllm_config: VllmConfig, num_tokens: int) -> str | None:
    """Returns why images of `num_tokens` cannot be served, as the end of a sentence, or None."""
    config, model_config = vllm_config.scheduler_config, vllm_config.model_config
    if model_config.multimodal_config.enable_mm_embeds:
        return "--enable-mm-embeds asks for embeddings, which this model does not take."
    if model_config.skip_tokenizer_init:
        return "--skip-tokenizer-init leaves out the tokenizer, which makes room for them."
    if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL:
        return "cudagraph_mode FULL captures prompts, which cannot have images then."
    backend = vllm_config.attention_config.backend
    if not current_platform.is_cpu() and backend != gpu_backend(vllm_config):
        return f"attention backend {backend} does not let the tokens of an image see each other."
    if config.max_num_batched_tokens < num_tokens:
        return (
            f"one takes up to {num_tokens} tokens of one step, and --max-num-batched-tokens is "
            f"{config.max_num_batched_tokens}."
        )
    return None
