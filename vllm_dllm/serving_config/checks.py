"""Start-up checks of what no diffusion model can be served with, room for images, how many requests
are served at once, which steps become CUDA graphs, and which of vLLM's kernels runs the experts,
where that was measured on such a GPU."""

from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from vllm_dllm.attention import gpu_backend
from vllm_dllm.config import tiles
from vllm_dllm.config.step_sizes import capture_sizes, max_canvases_per_step
from vllm_dllm.models.vocabulary import shards_begin_at_blocks
from vllm_dllm.quantization import modelopt
from vllm_dllm.quantization.weight_files import INDEX_FILE, WEIGHTS_FILE, read_shards

logger = init_logger(__name__)


def check_pipeline(vllm_config: VllmConfig) -> None:
    """Raises ValueError for pipeline parallelism, where only the last stage learns which canvases
    are committed."""
    if (size := vllm_config.parallel_config.pipeline_parallel_size) != 1:
        raise ValueError(
            f"pipeline_parallel_size must be 1 for a diffusion model, got {size}: only the "
            f"last stage learns which canvases are committed. Use --tensor-parallel-size."
        )


def check_weight_files(vllm_config: VllmConfig) -> None:
    """Raises ValueError, naming the file, if a weight file of a local checkpoint is missing, cut
    short or not in safetensors. vLLM's loader reads the files that are there, and its errors name
    none. Files of other names and formats that the user asks for are left to vLLM."""
    folder, load_format = Path(vllm_config.model_config.model), vllm_config.load_config.load_format
    known = any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    # vLLM handles formats that are asked for by name, and safetensors of other names.
    unread = load_format == "auto" and folder.is_dir() and not any(folder.glob("*.safetensors"))
    if (known or unread) and load_format != "dummy":
        read_shards(folder)


def check_stop_tokens(vllm_config: VllmConfig) -> None:
    """Raises ValueError if a stop token of the checkpoint is not in its vocabulary, so that no
    answer would end."""
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    sources = {
        "generation_config.json": model_config.try_get_generation_config(),
        "config.json": {"eos_token_id": getattr(model_config.hf_config, "eos_token_id", None)},
    }
    for file, values in sources.items():
        ids = values.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"eos_token_id in {file} must be a token id, or several, from 0 to "
                    f"{vocab_size - 1}, got {ids!r}: no answer would end. Correct it there."
                )


def check_token_budget(vllm_config: VllmConfig) -> None:
    """Raises ValueError if a limit of a step's tokens is below the canvas length. A canvas is
    denoised in one piece, so its request would wait for ever."""
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    config = vllm_config.scheduler_config
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        budget = getattr(config, name)
        if budget and budget < canvas_length:  # 0 and None: no such limit
            raise ValueError(
                f"{name} must be at least the canvas length, {canvas_length} tokens, got {budget}: "
                f"a canvas is denoised in one piece. Raise it or leave it out."
            )


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
        logger.warning("Images are refused, text alone is served: %s", obstacle)
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
    """Returns why images cannot be served, as the end of a sentence in the log; None if they can.
    `num_tokens`: most tokens of an image."""
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


SLOT_MEMORY_BYTES = 512 << 20
"""Most memory for what requests keep from step to step, where the number of requests is a
default."""
LOGITS_MEMORY_BYTES = 4 << 30
"""Most memory for the logits of a step's canvases, where the number of requests is a default."""
FEWEST_REQUESTS = 8  # stock vLLM's default


def choose_cuda_graphs(vllm_config: VllmConfig) -> None:
    """Sets in `vllm_config`, in place, which steps become CUDA graphs, unless the user did. Logs
    these steps, and how many canvases a step has room for."""
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    config, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
    budget, num_reqs = config.max_num_batched_tokens, config.max_num_seqs
    room = budget // canvas_length
    if num_reqs > room:
        wanted = num_reqs * canvas_length
        why = f"the others wait (--max-num-batched-tokens {wanted} has room for all)"
    else:
        why = f"{budget - num_reqs * canvas_length} tokens are left to prompts"
    chosen = (graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size)
    captured = "as configured"
    if has_cuda_graphs(vllm_config) and chosen == (None, None):
        graphs.cudagraph_capture_sizes = sizes = capture_sizes(canvas_length, num_reqs, budget)
        captured = f"for steps of {', '.join(map(str, sizes))} tokens"
    logger.info(
        "Serving at most %d requests at once: a step of %d tokens has room for %d canvases of %d, "
        "%s. CUDA graphs %s.",
        *(num_reqs, budget, room, canvas_length, why, captured),
    )


def has_cuda_graphs(vllm_config: VllmConfig) -> bool:
    """Returns whether steps become CUDA graphs. Called before vLLM has set the mode: where the user
    named none, the optimization level decides."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None and vllm_config.optimization_level == OptimizationLevel.O0:
        mode = CUDAGraphMode.NONE
    return mode != CUDAGraphMode.NONE and not vllm_config.model_config.enforce_eager


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
        most = min(most, LOGITS_MEMORY_BYTES // (canvas_length * config.vocab_size * 8))
    most = max(FEWEST_REQUESTS, most)
    if current_platform.is_cuda_alike():
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        most = min(most, max_canvases_per_step(budget, canvas_length))
    return most


logger = init_logger(__name__)


def prefer_tuned_kernel(vllm_config: VllmConfig, folder: Path = tiles.FOLDER) -> None:
    """Sets `--moe-backend triton` in `vllm_config`, in place, where we ship tile sizes for the
    model's FP8 experts on this GPU. Does nothing without an NVIDIA GPU, if the user named a
    backend, and where `tiles.may_replace_experts` says no."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not current_platform.is_cuda() or vllm_config.kernel_config.moe_backend != "auto":
        return
    experts = getattr(model_config.hf_text_config, "num_experts", None)
    if not experts or not _is_fp8_by_channel(model_config.hf_config):
        return
    if not tiles.may_replace_experts(vllm_config, folder):
        return
    from vllm_dllm.compat.experts import name_tiles_file  # takes seconds

    width = model_config.hf_text_config.moe_intermediate_size
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks *= parallel.prefill_context_parallel_size
    if parallel.enable_expert_parallel:
        experts //= ranks
    else:
        width //= ranks
    if (tiles.FOLDER / name_tiles_file(experts, width, "fp8_w8a8")).exists():
        vllm_config.kernel_config.moe_backend = "triton"
        logger.info(
            "Experts run vLLM's Triton kernel (--moe-backend triton), with tile sizes for canvases "
            "that were measured on such a GPU."
        )


def _is_fp8_by_channel(config: Any) -> bool:
    """Whether a checkpoint's weights are FP8 with a scale for each output channel, as
    compressed-tensors writes them. `config`: its configuration."""
    found = getattr(config, "quantization_config", None) or {}
    weights = [group.get("weights") or {} for group in found.get("config_groups", {}).values()]
    return bool(weights) and all(
        (each.get("type"), each.get("num_bits"), each.get("strategy")) == ("float", 8, "channel")
        for each in weights
    )
