"""Which steps become CUDA graphs, and what a step has room for."""

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger

from vllm_dllm.config.step_sizes import capture_sizes

logger = init_logger(__name__)


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
