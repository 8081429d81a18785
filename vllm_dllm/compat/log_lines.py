"""Lines of vLLM's log that we recognise, and warnings that we drop because they are wrong.

Imports nothing of vLLM, whose modules log while they are being imported.
"""

import logging
import re
import threading
import traceback
from collections.abc import Collection

ENGINE = "vllm.v1.engine.core"
WORKER = "vllm.v1.executor.multiproc_executor"
FAILED_START = {WORKER: "WorkerProc failed to start.", ENGINE: "EngineCore failed to start."}
"""Logger -> the message with which a child process logs the exception that ends its start."""

FAILED_CALL = "WorkerProc hit an exception."
"""What a worker logs when a call from the engine fails, at a start or later."""
START_CALLS = {
    *("get_kv_cache_spec", "get_supported_kv_cache_layouts", "set_kv_cache_layout"),
    *("determine_available_memory", "update_max_model_len", "initialize_from_config"),
    *("compile_or_warm_up_model", "get_kv_connector_handshake_metadata"),
}
"""Calls that an engine makes to its workers before it serves. If one fails, the start fails."""


CONFIG_READERS = {"load_config_file"}
"""The function that reads the file of `--config`."""


def was_raised_in(functions: Collection[str], error: BaseException) -> bool:
    """Whether an exception comes from one of `functions`, or from what they call."""
    return any(frame.name in functions for frame in traceback.extract_tb(error.__traceback__))


ENGINE_FAILED = "Engine core initialization failed."
"""How the parent's own exception begins. It only says that the child ended."""

WORKER_FAILED = re.compile(
    r"Worker failed with error '(.*)', please check the stack trace .*", re.S
)
"""How the engine repeats a worker's exception; the group is the exception's message."""

STOPPED = "Stopped before the server was ready."
"""What a server says last if it is told to stop while it starts."""

WRONG_WARNINGS = {
    "vllm.config.scheduler": "Using custom scheduler class %s.",
    "vllm.plugins": "Found endpoint plugin(s) %s but VLLM_PLUGINS is not set.",
    "vllm.platforms.interface": "Unknown vLLM environment variable detected: %s",
}
"""Logger -> how a warning begins that is wrong of what is ours: our schedulers keep asynchronous
scheduling, a server without the page for canvases lacks nothing, and our variable is known."""
_OURS = ("vllm_dllm", "VLLM_DLLM_UNKNOWN_VLLM")

WRONG_CPU_WARNINGS = {
    "vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend.",
    "vllm.platforms.cpu": "Triton is not installed.",
    "vllm.config.vllm": "Inductor compilation was disabled by user settings,",
    "vllm.utils.torch_utils": "OMP_NUM_THREADS=%s is set; leaving Torch threads at",
}
"""Logger -> how a warning begins that is wrong on CPUs: Triton is installed, its kernels are
replaced (`vllm_dllm.cpu`), Inductor compiles by default, and a CPU worker's threads are meant to
compute."""


CLIENT = "vllm.v1.engine.core_client"
ENGINE_GONE = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
"""What `CLIENT` warns of an engine that ends. At the end of a user's program it is expected to."""


def log_as_vllm_does() -> None:
    """Makes this project's loggers children of vLLM's, with its handlers and level, and enables
    them if it is enabled. A user's logging configuration disables all loggers that there are but
    those below the ones that it names, unless it says otherwise. Repeatable."""
    vllms = logging.getLogger("vllm")
    logging.getLogger("vllm_dllm").parent = vllms
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "vllm_dllm" and isinstance(logger, logging.Logger):
            logger.disabled = vllms.disabled


def drop_wrong_warnings() -> None:
    """Has vLLM's loggers drop `WRONG_WARNINGS` that name only what is ours, and `ENGINE_GONE` at
    the end of a program. Repeatable."""
    for name in WRONG_WARNINGS:
        logging.getLogger(name).addFilter(_is_right)
    logging.getLogger(CLIENT).addFilter(_is_before_end)


def _is_before_end(record: logging.LogRecord) -> bool:
    """Returns whether a record is not `ENGINE_GONE` of a program whose main thread has ended."""
    return record.msg != ENGINE_GONE or threading.main_thread().is_alive()


def drop_wrong_cpu_warnings() -> None:
    """Has vLLM's loggers drop `WRONG_CPU_WARNINGS`. Call it before vLLM looks for Triton."""
    for name in WRONG_CPU_WARNINGS:
        logging.getLogger(name).addFilter(_is_right)


def _is_right(record: logging.LogRecord) -> bool:
    """Filters a log: whether a record is no wrong warning, or names what is not ours."""
    text = str(record.msg)
    if record.name in WRONG_CPU_WARNINGS:
        return not text.startswith(WRONG_CPU_WARNINGS[record.name])
    if not text.startswith(WRONG_WARNINGS[record.name]):
        return True
    assert isinstance(record.args, tuple)
    (named,) = record.args
    names = named if isinstance(named, list) else [named]
    return not all(str(name).startswith(_OURS) for name in names)
