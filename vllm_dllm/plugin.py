"""What vLLM calls, in each of its processes, because of the entry point `vllm.general_plugins`."""

import logging

from vllm import ModelRegistry
from vllm.logger import init_logger

from vllm_dllm import vllm_version

logger = init_logger(__name__)

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"


def register() -> None:
    """Makes this process know our models. Repeatable, and cheap: models are named by string."""
    _log_like_vllm()
    if not vllm_version.is_supported():
        logger.error(vllm_version.complaint())
        ModelRegistry.register_model(DIFFUSION_GEMMA, f"{vllm_version.__name__}:{DIFFUSION_GEMMA}")
        return

    # Here, because these import things that another vLLM may not have.
    from vllm_dllm import attention, compat, cpu, request
    from vllm_dllm.compat import drafting
    from vllm_dllm.serving_config import DiffusionGemmaServingConfig

    ModelRegistry.register_model(
        DIFFUSION_GEMMA,
        "vllm_dllm.models.diffusion_gemma:DiffusionGemmaForBlockDiffusion",
    )
    ModelRegistry.register_model("DFlashDraftModel", "vllm_dllm.drafters.model:DFlashDraftModel")
    compat.set_serving_config(DIFFUSION_GEMMA, DiffusionGemmaServingConfig)
    compat.set_schedulers(
        DIFFUSION_GEMMA,
        {
            "DiffusionScheduler": "vllm_dllm.scheduler.CanvasScheduler",
            "DiffusionAsyncScheduler": "vllm_dllm.scheduler.CanvasAsyncScheduler",
        },
    )
    compat.set_request_check(request.check_request)
    compat.set_choices_check(request.check_choices)
    compat.accept_all_sampling_params(DIFFUSION_GEMMA)
    compat.register_custom_attention_backend(attention.GPU_BACKEND)
    drafting.set_draft_schedulers(
        {
            drafting.StockScheduler: "vllm_dllm.drafters.scheduler.DraftWidthScheduler",
            drafting.StockAsyncScheduler: "vllm_dllm.drafters.scheduler.DraftWidthAsyncScheduler",
        },
    )
    drafting.set_dflash_speculator("vllm_dllm.drafters.dflash.WidthDFlashSpeculator")
    cpu.install()


def _log_like_vllm() -> None:
    """Our loggers are not children of vLLM's by name. Made so by hand, they follow its handlers
    and level, also when vLLM configures logging later."""
    logging.getLogger("vllm_dllm").parent = logging.getLogger("vllm")
