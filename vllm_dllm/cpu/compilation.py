"""How a CPU runs the model's forward: compiled or as a flat trace, but not module by module.

With the shipped checkpoint at batch 1, a forward took 14 ms module by module, 9 ms as the flat list
of operations that Dynamo traces, and 6.5 ms compiled by Inductor, which needs a C++ compiler.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from vllm.config import CompilationMode, VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger

from vllm_dllm.cpu import norm

logger = init_logger(__name__)


def has_compiler() -> bool:
    """Whether Inductor can build its kernels: it needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def choose(vllm_config: VllmConfig) -> None:
    """Decides what the command line left open. `--enforce-eager` and `--compilation-config` take
    precedence."""
    assert vllm_config.model_config is not None
    config = vllm_config.compilation_config
    is_eager = (
        vllm_config.model_config.enforce_eager
        or config.mode == CompilationMode.NONE
        or vllm_config.optimization_level == OptimizationLevel.O0
    )
    if not is_eager and config.mode is None and not has_compiler():
        logger.info(
            "No C++ compiler with Python headers found (g++, python3-dev): the model runs as a "
            "trace of single operations, about a third slower than compiled."
        )
        config.mode = CompilationMode.DYNAMO_TRACE_ONCE
        config.backend = "eager"
    if is_eager or config.backend == "eager":
        norm.prefer(vllm_config)
    if config.backend == "eager":
        # The worker inherits this. With this backend vLLM stores nothing ahead of time,
        # yet would work out a key for it, 14 ms, at every forward.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
