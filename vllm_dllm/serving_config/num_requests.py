"""How many requests are served at once where the user names no number."""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dllm.config.step_sizes import max_canvases_per_step
from vllm_dllm.models.vocabulary import shards_begin_at_blocks
from vllm_dllm.quantization import modelopt

SLOT_MEMORY_BYTES = 512 << 20
"""Most memory for what a default number of requests keeps from step to step."""
LOGITS_MEMORY_BYTES = 4 << 30
"""Most memory for the logits of a step's canvases, where the number of requests is a default."""
FEWEST_REQUESTS = 8  # stock vLLM's default


def default_max_num_seqs(vllm_config: VllmConfig) -> int:
    """Returns how many requests to serve at once where the user names no number. Their expected
    embeddings, most of what they keep from step to step, must fit into `SLOT_MEMORY_BYTES`. Their
    logits must fit into `LOGITS_MEMORY_BYTES`, unless logits are made tile by tile.

    On a GPU, a step must also have room for a canvas of each: other requests would wait while they
    hold slots and caches.
    """
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    per_request = canvas_length * config.hidden_size * model_config.dtype.itemsize
    most = SLOT_MEMORY_BYTES // per_request
    quantization = vllm_config.quant_config
    # These never quantise the embeddings here, see `quantization/config.py`.
    plain = quantization is None or quantization.get_name() in (
        "compressed-tensors", *modelopt.METHODS,
    )  # fmt: skip
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if not (plain and shards_begin_at_blocks(config.vocab_size, ranks)):
        most = min(most, most_with_logits(vllm_config))
    most = max(FEWEST_REQUESTS, most)
    if current_platform.is_cuda_alike():
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        most = min(most, max_canvases_per_step(budget, canvas_length))
    return most


def most_with_logits(vllm_config: VllmConfig) -> int:
    """Returns how many canvases have room for their logits, 8 bytes each, in `LOGITS_MEMORY_BYTES`;
    at least `FEWEST_REQUESTS`."""
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    per_canvas = 8 * canvas_length * vllm_config.model_config.get_vocab_size()
    return max(FEWEST_REQUESTS, LOGITS_MEMORY_BYTES // per_canvas)
