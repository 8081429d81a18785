"""Lines of vLLM's log that we wait for, or leave out.

Imports nothing of vLLM, whose modules log while they are being imported.
"""

import logging
import re
import traceback

ENGINE = "vllm.v1.engine.core"
WORKER = "vllm.v1.executor.multiproc_executor"
FAILED_START = {
    WORKER: "WorkerProc failed to start.",
    ENGINE: "EngineCore failed to start.",
}
"""Logger -> the message with which its process, a child, logs the exception that ends it."""

FAILED_CALL = "WorkerProc hit an exception."
"""What a worker logs when it cannot do what the engine asks of it, at a start or later."""
START_CALLS = frozenset(
    {
        *("get_kv_cache_spec", "get_supported_kv_cache_layouts", "set_kv_cache_layout"),
        *("determine_available_memory", "update_max_model_len", "initialize_from_config"),
        *("compile_or_warm_up_model", "get_kv_connector_handshake_metadata"),
    }
)
"""What an engine asks of a worker before it serves. A start in which one fails has failed."""


def failed_at_start(error: BaseException) -> bool:
    """Whether the exception that a worker logs comes from such a call."""
    return any(frame.name in START_CALLS for frame in traceback.extract_tb(error.__traceback__))


ENGINE_FAILED = "Engine core initialization failed."
"""How the parent's own exception begins. It knows no more than that the child ended."""

WORKER_FAILED = re.compile(
    r"Worker failed with error '(.*)', please check the stack trace .*", re.S
)
"""What the engine makes of the message of a worker's exception, which is the group."""

WRONG_OF_OURS = {
    "vllm.config.scheduler": "Using custom scheduler class %s.",
    "vllm.plugins": "Found endpoint plugin(s) %s but VLLM_PLUGINS is not set.",
}
"""Logger -> how a warning begins that is wrong of what it names, where that is ours: our schedulers
keep asynchronous scheduling, and a server without the page for canvases lacks nothing."""

WRONG_ON_CPUS = {
    "vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend.",
    "vllm.platforms.cpu": "Triton is not installed.",
    "vllm.utils.torch_utils": "OMP_NUM_THREADS=%s is set; leaving Torch threads at",
}
"""Logger -> how its line begins. Triton is installed, and nothing here needs its CPU backend. The
threads of a CPU's worker are what computes, and not what is in the way."""


def leave_out_what_is_wrong() -> None:
    """Leaves out what is wrong of ours. Repeatable."""
    for name in WRONG_OF_OURS:
        logging.getLogger(name).addFilter(_is_of_others)


def leave_out_what_is_wrong_on_cpus() -> None:
    """Leaves out what is wrong on a CPU: vLLM warns in each of its processes that Triton has no
    backend for it, then that Triton is not installed. It is, and the kernels that vLLM writes in it
    are replaced (`vllm_dllm.cpu`). Call it before vLLM looks for Triton. Repeatable."""
    for name in WRONG_ON_CPUS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(WRONG_ON_CPUS[record.name])


def _is_of_others(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(WRONG_OF_OURS[record.name]):
        return True
    assert isinstance(record.args, tuple)
    (named,) = record.args
    names = named if isinstance(named, list) else [named]
    return not all(str(name).startswith("vllm_dllm") for name in names)
