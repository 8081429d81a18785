"""What start-up checks and adjusts in vLLM's configuration before a diffusion model is served."""

import math
from dataclasses import asdict
from pathlib import Path

from vllm.config import VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import (
    DiffusionGemmaModelForBlockDiffusionConfig,
    VerifyAndUpdateConfig,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from vllm_dllm.attention import gpu_backend
from vllm_dllm.compat.ending import limit_interrupted_start
from vllm_dllm.config.architectures import family_of
from vllm_dllm.config.denoise import read_denoise_config
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.files import check_file
from vllm_dllm.config.masked import MaskedConfig, check_asked_blocks, check_verified
from vllm_dllm.config.workers import GPU_WORKER
from vllm_dllm.quantization import modelopt
from vllm_dllm.requests.options import server_defaults
from vllm_dllm.serving_config import checks, sizes
from vllm_dllm.serving_config.experts import prefer_tuned_experts
from vllm_dllm.serving_config.images import prepare_images

logger = init_logger(__name__)

CPU_PAGE = 128
"""Tokens of a page of the KV cache on CPUs. vLLM would choose as many, but later."""
SCHEDULER = "vllm_dllm.scheduling.scheduler.make_scheduler"
_CANVASES_OF_PROMPT = 4
"""Most tokens of a prompt in a step shared with others on CPUs, in canvases."""
_TOKENS_OF_PROMPT = 8192
"""Most tokens of a prompt in a step shared with others on GPUs: the default of vLLM's server on
large ones. Longer steps are no faster per token (H200, the 26B model: 10.3 us at 8,192, 10.9 at
4,096), and all requests wait for them: behind 32,768 tokens, 10,240 took 0.35 s."""


class DiffusionGemmaServingConfig(VerifyAndUpdateConfig):
    """Adjustments for DiffusionGemma: vLLM's own, as far as they suit the machine, and ours."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Checks and adjusts `vllm_config`, in place, to serve DiffusionGemma.

        Raises:
            ValueError: the checkpoint or the command line says something that cannot be served.
        """
        checks.check_use(vllm_config)
        if current_platform.is_cpu():
            set_cpu_cache_type(vllm_config)  # before what it reads is converted
        modelopt.adapt_modelopt_config(vllm_config.model_config)
        scheduler_config = vllm_config.scheduler_config
        max_num_seqs = scheduler_config.max_num_seqs
        adjust_as_vllm(vllm_config)
        if current_platform.is_cpu():
            choose_forward(vllm_config)
        limit_interrupted_start()
        set_scheduler_and_worker(vllm_config)
        limit_prompt_chunks(vllm_config)
        checks.check_token_budget(vllm_config)
        if vllm_config.model_config.supports_multimodal_inputs:
            prepare_images(vllm_config)
        if is_default := scheduler_config.max_num_seqs != max_num_seqs:
            most = sizes.default_max_num_seqs(vllm_config)
            scheduler_config.max_num_seqs = min(max_num_seqs, most)
        if current_platform.is_cuda_alike():
            captured = sizes.choose_capture_sizes(vllm_config)
            sizes.log_capacity(vllm_config, captured)
        elif is_default:
            logger.info("Serving at most %d requests at once.", scheduler_config.max_num_seqs)
        # Read again by the worker. Read here, too, so that a mistake ends the start at once.
        read_denoise_config(vllm_config)
        checks.check_overrides(vllm_config)
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        if extension.blocks_in_flight > 1:
            raise ValueError(
                f"blocks_in_flight must be 1 for this model, got {extension.blocks_in_flight}: "
                "DiffusionGemma denoises one canvas at a time. Leave it out of --additional-config."
            )
        finish_config(vllm_config, extension)
        if note := getattr(vllm_config.model_config.hf_config, "serving_note", None):
            logger.info(note)


def adjust_as_vllm(vllm_config: VllmConfig) -> None:
    """Makes vLLM's adjustments for DiffusionGemma in `vllm_config`, in place. Then sets our
    attention backend if this GPU runs it and the user named none, and on a CPU the user's choice
    again."""
    config = vllm_config.attention_config
    backend, flash_attn_version = config.backend, config.flash_attn_version
    fill_in_canvas_length(vllm_config)
    DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
    if current_platform.is_cpu():
        config.backend = backend  # stock picks Triton before asking the platform
    elif backend in (None, ours := gpu_backend(vllm_config)) and ours is not None:
        config.backend = ours
        # vLLM sets 4 for layers of different head sizes; our backend takes it for the user's.
        config.flash_attn_version = flash_attn_version
        logger.info(
            "Attention runs our kernels (--attention-backend %s), which know the window rules "
            "of diffusion models.",
            ours.name,
        )


class MaskedServingConfig(VerifyAndUpdateConfig):
    """Adjustments for models whose canvases are blocks of masks (`config.masked`)."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Checks and adjusts `vllm_config`, in place, to serve a masked model. vLLM calls this once
        for a model.

        Raises:
            ValueError: the checkpoint or the command line says something that cannot be served.
        """
        checks.check_use(vllm_config)
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        checks.check_overrides(vllm_config)
        set_canvas(vllm_config, extension.blocks_in_flight)
        scheduler_config = vllm_config.scheduler_config
        if scheduler_config.async_scheduling is None:
            # Small blocks lose more to commits of their own than the host's time hides.
            scheduler_config.async_scheduling = False
        # vLLM makes a connector of the size of an offloaded cache, but only after this.
        offloads = vllm_config.cache_config.kv_offloading_size is not None
        if offloads or vllm_config.kv_transfer_config is not None:
            option = "--kv-offloading-size" if offloads else "--kv-transfer-config"
            raise ValueError(
                f"A masked model cannot be served with {option} yet: what its steps "
                "leave in the cache is not final. Leave it out."
            )
        if current_platform.is_cpu():
            set_cpu_cache_type(vllm_config)
            choose_forward(vllm_config)
        else:
            set_attention_backend(vllm_config)
        limit_interrupted_start()
        set_scheduler_and_worker(vllm_config)
        checks.check_token_budget(vllm_config)
        if scheduler_config.max_num_seqs >= SchedulerConfig.DEFAULT_MAX_NUM_SEQS:  # not the user's
            most = sizes.most_with_logits(vllm_config)
            scheduler_config.max_num_seqs = min(scheduler_config.max_num_seqs, most)
            logger.info("Serving at most %d requests at once.", scheduler_config.max_num_seqs)
        for name in ("commit_last_block", "load_stages"):
            if getattr(extension, name):
                raise ValueError(
                    f"{name} is not for masked models yet. Leave it out of --additional-config."
                )
        finish_config(vllm_config, extension)


def fill_in_canvas_length(vllm_config: VllmConfig) -> DiffusionConfig:
    """Sets the canvas length in `vllm_config`, in place, to the checkpoint's unless the user named
    one. Returns what it is part of."""
    own_length = vllm_config.model_config.hf_config.canvas_length
    if vllm_config.diffusion_config is None:
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=own_length)
    elif vllm_config.diffusion_config.canvas_length is None:
        vllm_config.diffusion_config.canvas_length = own_length
    return vllm_config.diffusion_config


def set_canvas(vllm_config: VllmConfig, blocks_in_flight: int) -> None:
    """Sets the length of a masked model's canvas in `vllm_config`, in place, and pages of the KV
    cache that hold whole blocks. Logs a warning where blocks have another length than in training.
    Raises ValueError for blocks or pages that cannot be served, and for a number of steps."""
    own_length = vllm_config.model_config.hf_config.canvas_length
    diffusion_config = fill_in_canvas_length(vllm_config)
    if (steps := diffusion_config.max_denoising_steps) is not None:
        raise ValueError(
            f"max_denoising_steps in --diffusion-config is not for masked models, got {steps}. "
            f'Set "defaults": {{"diffusion_max_steps": {steps}}} of vllm_dllm in '
            f"--additional-config."
        )
    diffusion_config.canvas_length *= blocks_in_flight
    config = MaskedConfig.from_vllm_config(vllm_config)
    config.check_blocks_in_flight()
    config.warn_of_length(own_length, vllm_config.model_config.model)
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size:
        config.check_cache_page(cache_config.block_size)
    elif not config.family.is_causal:
        page = CPU_PAGE if current_platform.is_cpu() else cache_config.block_size
        cache_config.block_size = math.lcm(page, config.block_length)
        cache_config.user_specified_block_size = True  # else vLLM chooses again later


def finish_config(vllm_config: VllmConfig, extension: ExtensionConfig) -> None:
    """Checks and sets in `vllm_config`, in place, what every diffusion model needs. Call it after
    the model's own adjustments. Raises ValueError for settings or files that cannot be used."""
    model_config = vllm_config.model_config
    family = family_of(model_config.architecture, model_config.hf_config)
    defaults = server_defaults(extension.defaults, family)
    in_effect = {**defaults}
    if family is None:
        checks.check_layers(model_config)
        generation = read_denoise_config(vllm_config)
        in_effect = {"acceptance": "entropy_bound", **asdict(generation), **defaults}
        in_effect.setdefault("max_steps", generation.max_denoising_steps)
    checks.check_hf_overrides(model_config.hf_overrides, in_effect)
    check_asked_blocks(defaults.get("blocks_in_flight"), extension.blocks_in_flight)
    check_verified(defaults.get("acceptance"), family, extension.blocks_in_flight)
    prefer_tuned_experts(vllm_config, extension.kernel_choice)
    if extension.trace_path is not None:
        check_file("trace_path", Path(extension.trace_path))
    if vllm_config.shutdown_timeout == 0:  # vLLM's default, to end all requests at once
        vllm_config.shutdown_timeout = extension.drain_seconds
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    if vllm_config.scheduler_config.max_num_batched_tokens <= canvas_length:
        # vLLM's requests to warm up with have prompts of a canvas and a token. With room for none
        # of them the start would fail.
        vllm_config.kernel_config.enable_jit_warmup = False
    checks.check_sampler_options(vllm_config)
    checks.check_weight_files(vllm_config)
    checks.check_stop_tokens(vllm_config)


def set_attention_backend(vllm_config: VllmConfig) -> None:
    """Sets our attention backend in `vllm_config`, in place. Raises ValueError if this GPU does not
    run our kernels, or if the user named another backend: no others are block-causal."""
    attention_config, ours = vllm_config.attention_config, gpu_backend(vllm_config)
    if ours is None or attention_config.backend not in (None, ours):
        raise ValueError(
            "A masked model needs --attention-backend CUSTOM, our kernels, which need a GPU of "
            f"compute capability 8.0 or higher; got {attention_config.backend} on "
            f"{current_platform.get_device_name()}. Leave the option out, or use another GPU."
        )
    attention_config.backend = ours


def set_scheduler_and_worker(vllm_config: VllmConfig) -> None:
    """Sets the scheduler and the worker of diffusion models in `vllm_config`, in place, unless the
    user named others. On CPUs it leaves the worker alone. Raises ValueError for a scheduler that
    does not know canvases."""
    scheduler_config, parallel_config = vllm_config.scheduler_config, vllm_config.parallel_config
    if scheduler_config.scheduler_cls is None:
        scheduler_config.scheduler_cls = SCHEDULER
    else:
        checks.check_scheduler(scheduler_config)
    # On CPUs `cpu.install` names the worker, for drafters too.
    if parallel_config.worker_cls == "auto" and current_platform.is_cuda_alike():
        parallel_config.worker_cls = GPU_WORKER


def limit_prompt_chunks(vllm_config: VllmConfig) -> None:
    """Limits in `vllm_config`, in place, how many tokens of a prompt a step computes, so that other
    requests' steps stay short. Does nothing where the user has set a limit. Applies on CPUs, and on
    GPUs where a step could hold more than `_TOKENS_OF_PROMPT`."""
    assert vllm_config.diffusion_config is not None
    canvas_length, config = vllm_config.diffusion_config.canvas_length, vllm_config.scheduler_config
    on_cpu = current_platform.is_cpu()
    most_tokens = _CANVASES_OF_PROMPT * canvas_length if on_cpu else _TOKENS_OF_PROMPT
    longest = min(vllm_config.model_config.max_model_len, config.max_num_batched_tokens)
    if config.long_prefill_token_threshold == 0 and canvas_length <= most_tokens < longest:
        config.long_prefill_token_threshold = most_tokens


def choose_forward(vllm_config: VllmConfig) -> None:
    """Sets in `vllm_config`, in place, whether a CPU runs the model compiled or not."""
    from vllm_dllm.cpu import compilation

    compilation.choose_compilation(vllm_config)


def set_cpu_cache_type(vllm_config: VllmConfig) -> None:
    """Gives the KV cache of a CPU, in `vllm_config`, in place, the model's type if the checkpoint
    asks for another that attention cannot read. Raises ValueError if the user asks for it."""
    masked, cache_config = MaskedConfig.if_masked(vllm_config), vllm_config.cache_config
    dtype = cache_config.cache_dtype
    own_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    reads_fp8 = masked is not None and not masked.verifies_copies  # with vLLM's own attention
    if dtype in ("auto", own_dtype) or (reads_fp8 and dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")):
        return
    if dtype != resolve_kv_cache_dtype_string("auto", vllm_config.model_config):
        readable = "auto or fp8" if reads_fp8 else "auto"
        raise ValueError(
            f"kv_cache_dtype must be {readable} on a CPU, got {dtype!r}: attention cannot read "
            f"another. Leave out --kv-cache-dtype."
        )
    logger.info_once("The KV cache has the model's type: on CPUs it is not quantised.")
    cache_config.cache_dtype = "auto"
