"""Installs our checks of vLLM's start, and its last line."""

import atexit
import contextlib
import gc
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_dllm.compat import log_lines, startup
from vllm_dllm.compat.drafting import is_dflash, is_dflash2
from vllm_dllm.config.extension import SECTION
from vllm_dllm.config.workers import DRAFT_SCHEDULER, DRAFT_WORKER, STOCK_GPU_WORKER
from vllm_dllm.startup import installation, last_line
from vllm_dllm.startup.model_folder import check_models

logger = init_logger(__name__)


def install() -> None:
    """Installs in this process our checks of an engine's arguments, the line for a port that is in
    use, the last line of a failed start, and filters of wrong warnings. Repeatable."""
    startup.set_config_hooks(_check_arguments, _set_drafter_classes)
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
    name cannot be served. Logs packages that are left out."""
    last_line.discard_first_error()
    check_models(arguments)
    check_chat_template(Path(arguments.model))
    if installation.left_out:
        logger.info(
            "Not used, because they cannot be imported: %s. Text models do not need them; for "
            "others install the builds of the PyTorch CPU index.",
            ", ".join(f"{name} ({reason})" for name, reason in installation.left_out.items()),
        )


def _set_drafter_classes(config: VllmConfig) -> None:
    """Sets in `config`, in place, our scheduler for targets of a DFlash drafter, and on GPUs our
    worker for targets of a DFlash or DFlash2 drafter, unless the user named others. Raises
    ValueError for settings of a DFlash drafter where another one drafts. (Diffusion models set
    their classes in `serving_config`.)"""
    is_ours = is_dflash(config.speculative_config)
    if not is_ours:
        _check_no_drafter_settings(config)
    if is_ours and config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = DRAFT_SCHEDULER
    is_ours = is_ours or is_dflash2(config.speculative_config)
    if is_ours and config.parallel_config.worker_cls == STOCK_GPU_WORKER:
        config.parallel_config.worker_cls = DRAFT_WORKER


def _check_no_drafter_settings(config: VllmConfig) -> None:
    """Raises ValueError if `config`, whose drafter is no DFlash one, has settings of DFlash
    drafters. Does nothing if it has no drafter at all."""
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


def explain_bind_error(host: str, port: int, error: OSError) -> str:
    """Returns the last line of a server that cannot listen on `host` and `port`, with what to
    do."""
    return (
        f"Error: cannot listen on {host or '0.0.0.0'}:{port}: {error.strerror}. Stop the program "
        f"that uses the port, or choose another one with --port (and the address with --host)."
    )


LIMIT_S = 20.0
"""Seconds that a template may run at the start. Templates take milliseconds, but a machine may be
busy."""
_CHAT = [{"role": "user", "content": "Hi"}]


class _TookTooLong(BaseException):
    """Raised in a template that takes too long. It is not an Exception, so that no template engine
    catches it."""


def check_chat_template(folder: Path, limit_s: float = LIMIT_S) -> None:
    """Runs the chat templates in a checkpoint's folder once. Does nothing outside the main thread.
    Other errors of a template are not raised here: clients who send chats get them.

    Raises:
        ValueError: a template runs for longer than `limit_s` seconds.
    """
    # Python handles signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return
    for source, template in _read_templates(folder):
        try:
            with _time_limit(limit_s), contextlib.suppress(Exception):
                render_jinja_template([_CHAT], chat_template=template, add_generation_prompt=True)
        except _TookTooLong:
            raise ValueError(
                f"The chat template in {source} must end, got one that was not done with 'Hi' "
                f"after {limit_s:g} s. Correct its loops, or remove it and name another with "
                f"--chat-template."
            ) from None


def _read_templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields each file in `folder` with a chat template, and the template. Files that cannot be
    read are left out."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield folder / "chat_template.jinja", (folder / "chat_template.jinja").read_text()
    config: Any = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "tokenizer_config.json").read_text())
    if isinstance(config, dict) and isinstance(config.get("chat_template"), str):
        yield folder / "tokenizer_config.json", config["chat_template"]


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the context once it has run for `seconds`. Replaces the handler of
    SIGALRM meanwhile, so it must be entered in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
