"""How many requests are served at once where the user names no number, what a step has room for,
and which steps become CUDA graphs."""

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.config.step_sizes import capture_sizes, max_canvases_per_step
from vllm_dllm.models.vocabulary import shards_begin_at_blocks
from vllm_dllm.quantization import modelopt

logger = init_logger(__name__)

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


def choose_capture_sizes(vllm_config: VllmConfig) -> list[int] | None:
    """Sets in `vllm_config`, in place, which steps become CUDA graphs. Returns their numbers of
    tokens. Does nothing and returns None if the user chose them, or wants no graphs."""
    assert vllm_config.diffusion_config is not None
    config, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
    asked = (graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size)
    if not has_cuda_graphs(vllm_config) or asked != (None, None):
        return None
    sizes = capture_sizes(
        vllm_config.diffusion_config.canvas_length,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
    graphs.cudagraph_capture_sizes = sizes
    return sizes


def log_capacity(vllm_config: VllmConfig, captured: list[int] | None) -> None:
    """Logs how many canvases a step has room for, and which steps become CUDA graphs. `captured`:
    the result of `choose_capture_sizes`."""
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    config = vllm_config.scheduler_config
    budget, num_reqs = config.max_num_batched_tokens, config.max_num_seqs
    room = budget // canvas_length
    if num_reqs > room:
        wanted = num_reqs * canvas_length
        others = f"the others wait (--max-num-batched-tokens {wanted} has room for all)"
    else:
        others = f"{budget - num_reqs * canvas_length} tokens are left to prompts"
    if captured is not None:
        graphs = f"for steps of {', '.join(map(str, captured))} tokens"
    else:
        graphs = "as configured" if has_cuda_graphs(vllm_config) else "are off"
    logger.info(
        "Serving at most %d requests at once: a step of %d tokens has room for %d canvases of %d, "
        "%s. CUDA graphs %s.",
        *(num_reqs, budget, room, canvas_length, others, graphs),
    )


def has_cuda_graphs(vllm_config: VllmConfig) -> bool:
    """Whether steps become CUDA graphs. Where the user named no mode yet, the level decides."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None and vllm_config.optimization_level == OptimizationLevel.O0:
        mode = CUDAGraphMode.NONE
    return mode != CUDAGraphMode.NONE and not vllm_config.model_config.enforce_eager
