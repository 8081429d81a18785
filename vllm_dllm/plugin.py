"""Installs the extension: vLLM calls `register`, in `vllm.general_plugins`, in each process."""

from vllm import ModelRegistry
from vllm.logger import init_logger

from vllm_dllm.compat import log_lines, version
from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES, register_configs

logger = init_logger(__name__)


def register() -> None:
    """Installs the extension in this process. Repeatable, and cheap: models are named by string.

    With a vLLM that is not supported, logs that and installs only a placeholder for DiffusionGemma,
    which raises an error when a server loads it.
    """
    log_lines.log_as_vllm_does()
    # A placeholder until the end of `_install`. If that fails, vLLM logs it and goes on, and would
    # serve its own class of this name.
    ModelRegistry.register_model(DIFFUSION_GEMMA, f"{version.__name__}:{DIFFUSION_GEMMA}")
    if not version.is_known():
        (logger.warning if version.can_serve() else logger.error)(version.describe_unknown_vllm())
    if version.can_serve():
        _install()


# The following functions import what other versions of vLLM may not have.


def _install() -> None:
    """Registers models and backends, patches vLLM, and replaces the placeholder at the end."""
    from vllm import envs
    from vllm.platforms import current_platform

    from vllm_dllm import attention
    from vllm_dllm.compat import ending, logprobs, metrics
    from vllm_dllm.compat.attention import register_custom_attention_backend
    from vllm_dllm.config import canvas_feeds
    from vllm_dllm.metrics.prometheus import CanvasMetrics, DraftMetrics
    from vllm_dllm.startup import hooks

    _register_models()
    _install_admission()
    logprobs.cache_token_texts()
    logprobs.return_revealed_steps()
    ending.stop_gracefully()
    metrics.add_canvas_and_draft_metrics(CanvasMetrics, DraftMetrics)
    register_custom_attention_backend(attention.GPU_BACKEND)
    if current_platform.is_cpu():
        from vllm_dllm.cpu.install import install

        install()
    hooks.install()
    if canvas_feeds.PLUGIN in (envs.VLLM_PLUGINS or ()):
        canvas_feeds.make_socket_folder(envs.VLLM_RPC_BASE_PATH)
    ModelRegistry.register_model(
        DIFFUSION_GEMMA, "vllm_dllm.models.diffusion_gemma:DiffusionGemmaForBlockDiffusion"
    )


def _register_models() -> None:
    """Registers all models but DiffusionGemma, and checks of all models' configurations."""
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


def _install_admission() -> None:
    """Installs admission, checks of HTTP bodies, parsers of answers, and counts in `usage`."""
    from vllm_dllm.compat import admission, http, usage
    from vllm_dllm.compat.patching import is_server
    from vllm_dllm.requests.admission import ServedModel, admit, admit_target
    from vllm_dllm.requests.http import (
        check_body_without_xargs,
        check_messages,
        check_request_body,
        check_text,
        refuse_beam_search,
        wrong_type_error,
    )
    from vllm_dllm.requests.prediction import make_accepted_token_counter

    admission.set_admission(
        (DIFFUSION_GEMMA, *FAMILIES), ServedModel.from_config, admit, admit_target
    )
    http.check_bodies(
        check_request_body, check_body_without_xargs, check_messages, check_text, wrong_type_error
    )
    http.admit_before_streams(make_accepted_token_counter)
    http.set_beam_search_check(refuse_beam_search)
    usage.patch_usage()
    if is_server():
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager  # takes a second

        from vllm_dllm.compat.parsers import show_prompts_to_parsers

        show_prompts_to_parsers()
        ToolParserManager.register_lazy_module(
            "gemma4_strict", "vllm_dllm.requests.gemma_tool_parser", "GemmaToolParser"
        )
        ReasoningParserManager.register_lazy_module(
            "gemma4", "vllm_dllm.requests.gemma_reasoning_parser", "GemmaReasoningParser"
        )
