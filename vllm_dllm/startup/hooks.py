"""Installs our checks of vLLM's start, and its last line."""

import atexit
import errno
import gc
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.compat import log_lines, startup
from vllm_dllm.compat.drafting import is_dflash, is_dflash2
from vllm_dllm.compat.patching import is_server
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.extension import SECTION, ExtensionConfig
from vllm_dllm.config.workers import DRAFT_SCHEDULER, DRAFT_WORKER, STOCK_GPU_WORKER
from vllm_dllm.startup import installation, last_line
from vllm_dllm.startup.model_folder import (
    check_chat_template,
    check_downloaded_model,
    check_engine_arguments,
)

logger = init_logger(__name__)


def install() -> None:
    """Installs in this process our checks of an engine's arguments, the line for a port that is in
    use, the last line of a failed start, and filters of wrong warnings. Repeatable."""
    startup.set_config_hooks(_check_arguments, _set_drafter_classes, check_downloaded_model)
    startup.explain_bind_errors(explain_bind_error)
    last_line.install()
    log_lines.drop_wrong_warnings()
    # vLLM freezes all objects for the garbage collector, so Python frees none of them at exit, and
    # Triton's bindings report hundreds of "leaked" objects. Unregistering first makes this
    # repeatable.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def _check_arguments(arguments: EngineArgs) -> None:
    """Raises ValueError if the model, the drafter or the chat template that an engine's arguments
    name cannot be served, a variable cannot be read, or there is no room for the name of a socket
    of canvases, which a server makes when its engine has started. Logs which packages are left out.
    """
    last_line.discard_first_error()
    if current_platform.is_cpu():
        from vllm_dllm.cpu.install import check_variables

        check_variables(os.environ)
    if is_server() and (folder := canvas_feeds.socket_folder()) is not None:
        canvas_feeds.socket_path(folder, canvas_feeds.new_random_name())
    check_engine_arguments(arguments)
    check_chat_template(Path(arguments.model))
    if installation.left_out:
        logger.info(
            "Not used, because they cannot be imported: %s. Text models do not need them; for "
            "others install the builds of the PyTorch CPU index.",
            ", ".join(f"{name} ({reason})" for name, reason in installation.left_out.items()),
        )


def _set_drafter_classes(config: VllmConfig) -> None:
    """Sets in `config`, in place, our scheduler for targets of a DFlash drafter, and on GPUs our
    worker for targets of a DFlash or DFlash2 drafter, unless the user named others. Model runner v1
    and `enable_adaptive_verification` are left to vLLM's. Raises ValueError for settings of a
    DFlash drafter that are wrong, or that vLLM's own classes would have to follow. (Diffusion
    models set theirs in `serving_config`.)"""
    speculative = config.speculative_config
    is_adaptive = getattr(speculative, "enable_adaptive_verification", False)
    may_draft = speculative is not None and config.use_v2_model_runner and not is_adaptive
    has_dflash = may_draft and is_dflash(speculative)
    if not has_dflash:
        _check_no_drafter_settings(config)
    else:
        # Read again by scheduler and worker. Here a mistake ends the start at once.
        settings = ExtensionConfig.from_additional_config(config.additional_config).drafter
        settings.max_width(speculative.num_speculative_tokens)
        if config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = DRAFT_SCHEDULER
    has_drafter_of_ours = has_dflash or (may_draft and is_dflash2(speculative))
    if has_drafter_of_ours and config.parallel_config.worker_cls == STOCK_GPU_WORKER:
        config.parallel_config.worker_cls = DRAFT_WORKER


def _check_no_drafter_settings(config: VllmConfig) -> None:
    """Raises ValueError if `config` has settings of DFlash drafters for another drafter, or for a
    diffusion model. Other models without a drafter are vLLM's alone, whatever the settings."""
    given, speculative = config.additional_config, config.speculative_config
    section = given.get(SECTION) if isinstance(given, Mapping) else None
    settings = section.get("drafter") if isinstance(section, Mapping) else None
    if not settings or (speculative is None and not config.model_config.is_diffusion):
        return
    if speculative is None:
        raise ValueError(
            "The settings of 'drafter' in --additional-config are for DFlash drafters, got them "
            "with a diffusion model, which has no drafter. Leave them out."
        )
    names = speculative.draft_model_config and speculative.draft_model_config.architectures
    raise ValueError(
        f"The settings of 'drafter' in --additional-config are for DFlash drafters, got method "
        f"{speculative.method!r} in --speculative-config"
        + (f" with a {', '.join(names)}" if names else "")
        + ", which drafts as vLLM does. Leave them out, or name a DFlash drafter."
    )


def explain_bind_error(host: str, port: int, error: OSError | OverflowError) -> str:
    """Returns the last line of a server that cannot listen on `host` and `port`. An OverflowError
    says that there is no such port."""
    if isinstance(error, OverflowError):
        return f"Error: --port must be from 0 to 65535, got {port}."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "--host must be an address of this machine, such as 127.0.0.1."
    elif error.errno == errno.EACCES:
        remedy = "This user may not use the port: choose one from 1024 with --port."
    else:
        remedy = "Stop the program that uses the port, or choose another one with --port."
    return f"Error: cannot listen on {host or '0.0.0.0'}:{port}: {error.strerror}. {remedy}"
