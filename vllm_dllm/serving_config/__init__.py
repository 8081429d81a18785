"""What start-up checks and adjusts in vLLM's configuration before a diffusion model is served."""

import math
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.diffusion import DiffusionConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import (
    DiffusionGemmaModelForBlockDiffusionConfig,
    VerifyAndUpdateConfig,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from vllm_dllm.attention import gpu_backend
from vllm_dllm.compat.ending import limit_interrupted_start
from vllm_dllm.config import tiles
from vllm_dllm.config.architectures import family_of
from vllm_dllm.config.denoise import read_denoise_config
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.files import check_file
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.config.workers import GPU_WORKER
from vllm_dllm.measured import folder
from vllm_dllm.quantization import modelopt
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.serving_config.checks import (
    check_pipeline,
    check_stop_tokens,
    check_token_budget,
    check_weight_files,
)
from vllm_dllm.serving_config.steps import (
    FEWEST_REQUESTS,
    LOGITS_MEMORY_BYTES,
    choose_steps,
    default_max_num_seqs,
)

logger = init_logger(__name__)

CPU_PAGE = 128
"""Tokens of a page of the KV cache that vLLM chooses on CPUs, after models had their say."""
SCHEDULER = "vllm_dllm.scheduling.scheduler.make_scheduler"
PROCESSOR_ONLY: Any = "processor_only"
"""What vLLM chooses by itself where an engine and several API servers share no cache."""
_CANVASES_OF_PROMPT = 4
"""Tokens of a prompt in a step that others share, in canvases; on CPUs."""
_TOKENS_OF_PROMPT = 8192
"""The same on GPUs: what vLLM's server has in a step on large ones, unless told otherwise. From
there on longer steps are no faster by the token (H200, the 26B model: 10.3 us at 8,192, 10.9 at
4,096), and everyone waits for them: behind 32,768 tokens, 10,240 took 0.35 s."""


class DiffusionGemmaServingConfig(VerifyAndUpdateConfig):
    """Stock vLLM's adjustments, without those that a CPU or a small vocabulary does not need."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError when the checkpoint or the command line says something unusable."""
        check_pipeline(vllm_config)
        modelopt.prepare(vllm_config.model_config)
        scheduler_config, attention_config = (
            vllm_config.scheduler_config,
            vllm_config.attention_config,
        )
        max_num_seqs, backend = scheduler_config.max_num_seqs, attention_config.backend
        flash_attn_version = attention_config.flash_attn_version
        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
        if current_platform.is_cpu():
            attention_config.backend = backend  # stock picks Triton before asking the platform
            choose_forward(vllm_config)
        elif backend in (None, ours := gpu_backend(vllm_config)) and ours is not None:
            attention_config.backend = ours
            # Stock picks 4 for layers of different head sizes; to our backend it is a user's wish.
            attention_config.flash_attn_version = flash_attn_version
            logger.info(
                "Attention runs our kernels (--attention-backend %s), which know the window rules "
                "of diffusion models.",
                ours.name,
            )
        limit_interrupted_start()
        use_our_classes(vllm_config)
        leave_room_beside_prompts(vllm_config)
        check_token_budget(vllm_config)
        if vllm_config.model_config.supports_multimodal_inputs:
            prepare_images(vllm_config)
        if is_default := scheduler_config.max_num_seqs != max_num_seqs:
            scheduler_config.max_num_seqs = min(max_num_seqs, default_max_num_seqs(vllm_config))
        if current_platform.is_cuda_alike():
            choose_steps(vllm_config)
        elif is_default:
            logger.info("Serving at most %d requests at once.", scheduler_config.max_num_seqs)
        # Read again by the worker; here, a mistake ends the start at once and in plain sight.
        read_denoise_config(vllm_config)
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        if extension.blocks_in_flight > 1:
            raise ValueError(
                f"blocks_in_flight must be 1 for this model, got {extension.blocks_in_flight}: "
                "DiffusionGemma denoises one canvas at a time. Leave it out of --additional-config."
            )
        finish(vllm_config, extension)
        if note := getattr(vllm_config.model_config.hf_config, "serving_note", None):
            logger.info(note)


class MaskedServingConfig(VerifyAndUpdateConfig):
    """Adjusts vLLM's for models whose canvases are blocks of masks (`config.masked`)."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError when the checkpoint or the command line says something unusable."""
        check_pipeline(vllm_config)
        own_length = vllm_config.model_config.hf_config.canvas_length
        if vllm_config.diffusion_config is None:
            vllm_config.diffusion_config = DiffusionConfig(canvas_length=own_length)
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        # vLLM comes here once for a model.
        vllm_config.diffusion_config.canvas_length *= extension.blocks_in_flight
        config = MaskedConfig.from_vllm_config(vllm_config)
        config.check_blocks_in_flight()
        if config.block_length > own_length:
            # Not refused: the published loops take any length as an argument.
            logger.warning(
                "--diffusion-config asks for blocks of %d tokens, and the checkpoint has blocks of "
                "%d (%s in config.json). A model answers worse in longer blocks than it was "
                "trained with.",
                config.block_length,
                own_length,
                config.family.block_key,
            )
        cache_config, scheduler_config = vllm_config.cache_config, vllm_config.scheduler_config
        if cache_config.user_specified_block_size:
            config.check_cache(cache_config.block_size, "--block-size")
        elif not config.family.is_causal:
            page = CPU_PAGE if current_platform.is_cpu() else cache_config.block_size
            cache_config.block_size = math.lcm(page, config.block_length)
            cache_config.user_specified_block_size = True  # or vLLM chooses once more, later
        if scheduler_config.async_scheduling is None:
            # Small blocks lose more to commits of their own than the host's time hides.
            scheduler_config.async_scheduling = False
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "A masked model cannot be served with --kv-transfer-config yet: what its steps "
                "leave in the cache is not final. Leave it out."
            )
        if current_platform.is_cpu():
            choose_forward(vllm_config)
        else:
            use_our_attention(vllm_config)
        limit_interrupted_start()
        use_our_classes(vllm_config)
        check_token_budget(vllm_config)
        if scheduler_config.max_num_seqs >= SchedulerConfig.DEFAULT_MAX_NUM_SEQS:  # not the user's
            canvas_length = vllm_config.diffusion_config.canvas_length
            per_request = 8 * canvas_length * vllm_config.model_config.get_vocab_size()
            most = max(FEWEST_REQUESTS, LOGITS_MEMORY_BYTES // per_request)
            scheduler_config.max_num_seqs = min(scheduler_config.max_num_seqs, most)
            logger.info("Serving at most %d requests at once.", scheduler_config.max_num_seqs)
        for name in ("commit_last_block", "load_stages"):
            if getattr(extension, name):
                raise ValueError(
                    f"{name} is not for masked models yet. Leave it out of --additional-config."
                )
        finish(vllm_config, extension)


def finish(vllm_config: VllmConfig, extension: ExtensionConfig) -> None:
    """What the start of every diffusion model checks and sets."""
    model_config = vllm_config.model_config
    server_defaults(
        extension.defaults, family_of(model_config.architecture, model_config.hf_config)
    )
    offer_tiles(vllm_config, extension)
    if extension.trace_path is not None:
        check_file("trace_path", Path(extension.trace_path))
    if vllm_config.shutdown_timeout == 0:  # vLLM's default, to end all requests at once
        vllm_config.shutdown_timeout = extension.drain_seconds
    check_weight_files(vllm_config)
    check_stop_tokens(vllm_config)


def offer_tiles(vllm_config: VllmConfig, extension: ExtensionConfig) -> None:
    """Lets vLLM find the tiles of experts that the setting `kernel_choice` is for."""
    if extension.kernel_choice == "measured":
        tiles.offer(folder.result_folder(vllm_config))  # empty before the first start has measured
    elif extension.kernel_choice == "shipped":
        tiles.offer()


def use_our_attention(vllm_config: VllmConfig) -> None:
    """Raises ValueError unless this GPU runs our kernels, which alone are causal by blocks."""
    attention_config, ours = vllm_config.attention_config, gpu_backend(vllm_config)
    if ours is None or attention_config.backend not in (None, ours):
        raise ValueError(
            "A masked model needs --attention-backend CUSTOM, our kernels, which want a GPU of "
            f"compute capability 8.0 and up; got {attention_config.backend} on "
            f"{current_platform.get_device_name()}. Leave the option out, or use another GPU."
        )
    attention_config.backend = ours


def use_our_classes(vllm_config: VllmConfig) -> None:
    """Names the scheduler and the worker of diffusion models, unless the user named others."""
    scheduler_config, parallel_config = vllm_config.scheduler_config, vllm_config.parallel_config
    if scheduler_config.scheduler_cls is None:
        scheduler_config.scheduler_cls = SCHEDULER
    # On CPUs `cpu.install` names the worker, for drafters too.
    if parallel_config.worker_cls == "auto" and current_platform.is_cuda_alike():
        parallel_config.worker_cls = GPU_WORKER


def leave_room_beside_prompts(vllm_config: VllmConfig) -> None:
    """Where a step takes longer with every row, the prompts of some do not fill the steps of
    others, unless the user wants them to: not on CPUs, and on GPUs not a budget that is made for
    many canvases."""
    assert vllm_config.diffusion_config is not None
    canvas_length, config = vllm_config.diffusion_config.canvas_length, vllm_config.scheduler_config
    on_cpu = current_platform.is_cpu()
    most_tokens = _CANVASES_OF_PROMPT * canvas_length if on_cpu else _TOKENS_OF_PROMPT
    longest = min(vllm_config.model_config.max_model_len, config.max_num_batched_tokens)
    if config.long_prefill_token_threshold == 0 and canvas_length <= most_tokens < longest:
        config.long_prefill_token_threshold = most_tokens


def prepare_images(vllm_config: VllmConfig) -> None:
    """Prepares a server of images: a step has room for a whole one, or a whole frame of a video,
    which the scheduler does not cut, and bytes are read with care.
    Where images cannot be served, text is, without the vision tower; the log says why."""
    from vllm_dllm.requests.media_url import read_carefully  # not for the start of other servers

    config, mm_config = vllm_config.scheduler_config, vllm_config.model_config.multimodal_config
    assert mm_config is not None
    info = MULTIMODAL_REGISTRY.get_processing_info(vllm_config.model_config)
    num_tokens = info.most_tokens_in_one_piece
    if obstacle := obstacle_to_images(vllm_config, num_tokens):
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
    read_carefully()


def choose_forward(vllm_config: VllmConfig) -> None:
    """How a CPU runs the model."""
    from vllm_dllm.cpu import compilation

    compilation.choose_compilation(vllm_config)


def obstacle_to_images(vllm_config: VllmConfig, num_tokens: int) -> str | None:
    """Why images of at most `num_tokens` each cannot be served. None: they can."""
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
