"""What vLLM calls, in each of its processes, because of the entry point `vllm.general_plugins`."""

import logging

from vllm import ModelRegistry
from vllm.logger import init_logger

from vllm_dllm.compat import version
from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES, register_configs

logger = init_logger(__name__)

CANVASES = "vllm_dllm_canvas"
"""The entry point in `vllm.endpoint_plugins`, which serves where `VLLM_PLUGINS` names it."""


def register() -> None:
    """Makes this process know our models. Repeatable, and cheap: models are named by string."""
    _log_like_vllm()
    # Until ours is registered. Where this fails, vLLM logs it, goes on, and would serve its own.
    ModelRegistry.register_model(DIFFUSION_GEMMA, f"{version.__name__}:{DIFFUSION_GEMMA}")
    if not version.is_known():
        (logger.warning if version.can_serve() else logger.error)(version.describe_unknown_vllm())
    if version.can_serve():
        _register()


# What these import, another vLLM may not have.


def _register() -> None:
    """Installs everything in this process; the model itself comes last."""
    from vllm import envs
    from vllm.platforms import current_platform

    from vllm_dllm import attention
    from vllm_dllm.compat import ending, logprobs, metrics, prompt_logprobs
    from vllm_dllm.compat.attention import register_custom_attention_backend
    from vllm_dllm.config import canvas_feeds
    from vllm_dllm.metrics.prometheus import CanvasMetrics, DraftMetrics
    from vllm_dllm.startup import hooks

    _register_models()
    _check_requests()
    prompt_logprobs.cache_token_texts()
    logprobs.return_revealed_steps()
    ending.stop_gracefully()
    metrics.set_metrics(CanvasMetrics, DraftMetrics)
    register_custom_attention_backend(attention.GPU_BACKEND)
    if current_platform.is_cpu():
        from vllm_dllm.cpu.install import install

        install()
    hooks.install()
    if CANVASES in (envs.VLLM_PLUGINS or ()):
        canvas_feeds.make_socket_folder(envs.VLLM_RPC_BASE_PATH)
    # Last: until here, vLLM must not serve the model.
    ModelRegistry.register_model(
        DIFFUSION_GEMMA,
        "vllm_dllm.models.diffusion_gemma:DiffusionGemmaForBlockDiffusion",
    )


def _register_models() -> None:
    """Registers the models with what their starts check; DiffusionGemma itself comes later."""
    from vllm_dllm.compat.startup import set_serving_config
    from vllm_dllm.serving_config import DiffusionGemmaServingConfig, MaskedServingConfig

    for drafter in ("DFlashDraftModel", "DFlash2DraftModel"):
        ModelRegistry.register_model(drafter, f"vllm_dllm.drafters.model:{drafter}")
    register_configs()
    for architecture, family in FAMILIES.items():
        place = f"vllm_dllm.models.{family.module}:{architecture}"
        ModelRegistry.register_model(architecture, place)
        set_serving_config(architecture, MaskedServingConfig)
    set_serving_config(DIFFUSION_GEMMA, DiffusionGemmaServingConfig)


def _check_requests() -> None:
    """Installs the checks of what a request may ask for, on its way into the engine."""
    from vllm_dllm.compat import admission, http, parsers, usage
    from vllm_dllm.requests.admission import Served, admit, admit_target
    from vllm_dllm.requests.http import check_body, refuse_beam_search, wrong_type
    from vllm_dllm.requests.prediction import accepted_tokens

    admission.set_admission((DIFFUSION_GEMMA, *FAMILIES), Served.from_config, admit, admit_target)
    http.check_bodies(check_body, wrong_type)
    http.admit_before_streams(accepted_tokens)
    http.set_beam_search_check(refuse_beam_search)
    parsers.register_parsers(
        ("gemma4_strict", "vllm_dllm.requests.gemma_tool_parser", "GemmaToolParser"),
        ("gemma4", "vllm_dllm.requests.gemma_reasoning_parser", "GemmaReasoningParser"),
    )
    usage.patch_usage()


def _log_like_vllm() -> None:
    """Makes our loggers children of vLLM's, which they are not by name: they follow its handlers
    and level, also when vLLM configures logging later."""
    logging.getLogger("vllm_dllm").parent = logging.getLogger("vllm")
