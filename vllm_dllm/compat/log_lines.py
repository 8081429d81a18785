"""Lines of vLLM's log that we wait for, or leave out.

Imports nothing of vLLM, whose modules log while they are being imported.
"""

import re

ENGINE = "vllm.v1.engine.core"
FAILED_START = {
    "vllm.v1.executor.multiproc_executor": "WorkerProc failed to start.",
    ENGINE: "EngineCore failed to start.",
}
"""Logger -> the message with which its process, a child, logs the exception that ends it."""

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
