"""What this project does about the start of vLLM's processes, and about their end."""

import atexit
import gc
from collections.abc import Mapping
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_dllm.compat import log_lines, startup
from vllm_dllm.compat.drafting import is_dflash, is_dflash2
from vllm_dllm.config.extension import SECTION
from vllm_dllm.config.workers import DRAFT_SCHEDULER, DRAFT_WORKER, STOCK_GPU_WORKER
from vllm_dllm.startup import installation, last_line
from vllm_dllm.startup.model_folder import check_chat_template, check_models

logger = init_logger(__name__)


def install() -> None:
    """Installs them in this process. Repeatable."""
    startup.set_config_hooks(_check, _complete)
    startup.explain_bind_errors(explain_address)
    last_line.install()
    log_lines.drop_wrong_warnings()
    # vLLM freezes what the garbage collector knows, and Python then frees none of it at the end:
    # Triton's bindings report hundreds of "leaked" objects. Registering it again replaces it.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def _check(arguments: EngineArgs) -> None:
    last_line.forget()
    check_models(arguments)
    check_chat_template(Path(arguments.model))
    if installation.left_out:
        logger.info(
            "Not used, because they cannot be imported: %s. Text models do not need them; for "
            "others install the builds of the PyTorch CPU index.",
            ", ".join(f"{name} ({reason})" for name, reason in installation.left_out.items()),
        )


def _complete(config: VllmConfig) -> None:
    """Targets of a DFlash drafter get our scheduler, and on GPUs our worker, where the user left
    both open; those of a DFlash2 drafter the worker. (The configurations of diffusion models name
    theirs: `serving_config`.)"""
    is_ours = is_dflash(config.speculative_config)
    if not is_ours:
        _check_no_drafter_settings(config)
    if is_ours and config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = DRAFT_SCHEDULER
    is_ours = is_ours or is_dflash2(config.speculative_config)
    if is_ours and config.parallel_config.worker_cls == STOCK_GPU_WORKER:
        config.parallel_config.worker_cls = DRAFT_WORKER


def _check_no_drafter_settings(config: VllmConfig) -> None:
    """Raises ValueError for settings of DFlash drafters where tokens are drafted in another way."""
    given, speculative = config.additional_config, config.speculative_config
    section = given.get(SECTION) if isinstance(given, Mapping) else None
    settings = section.get("drafter") if isinstance(section, Mapping) else None
    if speculative is None or not settings:
        return
    names = speculative.draft_model_config and speculative.draft_model_config.architectures
    raise ValueError(
        f"The settings of 'drafter' in --additional-config are for DFlash drafters, got method "
        f"{speculative.method!r} in --speculative-config"
        + (f" with a {', '.join(names)}" if names else "")
        + ", which drafts as vLLM does. Leave them out, or name a DFlash drafter."
    )


def explain_address(host: str, port: int, error: OSError) -> str:
    """The last line of a server that cannot listen."""
    return (
        f"Error: cannot listen on {host or '0.0.0.0'}:{port}: {error.strerror}. Stop the program "
        f"that uses the port, or choose another one with --port (and the address with --host)."
    )
