"""How a CPU runs the model's forward: compiled or as a flat trace, but not module by module.

With the shipped checkpoint at batch 1, a forward took 14 ms module by module, 9 ms as the flat list
of operations that Dynamo traces, and 6.5 ms compiled by Inductor, which needs a C++ compiler.

Where it is not compiled, RMS norms run in vLLM's C++ kernel: run op by op, a norm is six PyTorch
kernels, and a layer of Gemma4 has up to ten norms.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from vllm import envs, ir
from vllm.config import CompilationMode, VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger

import vllm_dllm
from vllm_dllm.cpu.compat import runner
from vllm_dllm.cpu.compat.ops import cpp_rms_norm
from vllm_dllm.cpu.cores import instruction_set

logger = init_logger(__name__)

MODEL_FOLDERS = ("attention", "compat", "config", "cpu", "drafters", "models", "quantization")
"""Folders whose sources shape the model when it is built."""


def has_compiler() -> bool:
    """Whether Inductor can build its kernels: it needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def can_keep_compiled_models() -> bool:
    """Whether vLLM's folder for what it compiles can be written to, or made. PyTorch also writes to
    it when it only loads a model."""
    folder = os.path.abspath(os.path.join(envs.VLLM_CACHE_ROOT, "torch_compile_cache"))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def choose_compilation(vllm_config: VllmConfig) -> None:
    """Sets in `vllm_config`, in place, the compilation mode and backend that the command line left
    open. `--enforce-eager` and `--compilation-config` take precedence. Without a C++ compiler, or
    a folder for what it makes, the model runs as a trace, and the log says so. Engines that share
    experts are never compiled."""
    assert vllm_config.model_config is not None
    config = vllm_config.compilation_config
    if vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        # A trace would keep how many rows each engine had in the step that was traced.
        config.mode = CompilationMode.NONE
    is_eager = (
        vllm_config.model_config.enforce_eager
        or config.mode == CompilationMode.NONE
        or vllm_config.optimization_level == OptimizationLevel.O0
    )
    obstacle = None if is_eager or config.mode is not None else _find_obstacle()
    if obstacle is not None:
        logger.info(
            "%s: the model runs as a trace of single operations, about a third slower than "
            "compiled.",
            obstacle,
        )
        config.mode = CompilationMode.DYNAMO_TRACE_ONCE
        config.backend = "eager"
    if is_eager or config.backend == "eager":
        prefer_cpp_norm(vllm_config)
    if config.backend == "eager":
        # The worker inherits this. With this backend vLLM stores nothing ahead of time,
        # yet would work out a key for it, 14 ms, at every forward.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def _find_obstacle() -> str | None:
    """Returns why the model cannot be compiled, or None if it can."""
    if not has_compiler():
        return "No C++ compiler with Python headers found (g++, python3-dev)"
    if not can_keep_compiled_models():
        return f"Nothing can be written to VLLM_CACHE_ROOT ({envs.VLLM_CACHE_ROOT})"
    return None


def reuse_compiled_models(vllm_config: VllmConfig) -> None:
    """Lets this worker load what an earlier start compiled, if it would compile the same: changes
    vLLM's cache key in `vllm_config`, in place. Call it when the number of threads is set."""
    runner.allow_loading_inductor_models()
    # What a compiled model depends on beyond vLLM's cache key, which has the versions of vLLM and
    # torch, the configurations, and the sources of functions called in the forward, but not our
    # sources, which shape the model when it is built.
    key = (
        hash_model_sources(),
        f"{torch.get_num_threads()} threads",
        torch.backends.cpu.get_cpu_capability(),  # the vectors in the generated code
        platform.machine(),
        instruction_set(),  # what the compiler was free to use
    )
    runner.add_to_cache_key(vllm_config, ", ".join(key))
    runner.set_compilation_callback(_log_compilation)


def hash_model_sources(package: Path = Path(vllm_dllm.__path__[0])) -> str:
    """Returns a digest, in hexadecimal, of the Python files of `package` in `MODEL_FOLDERS`."""
    digest = hashlib.sha256()
    for folder in MODEL_FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _log_compilation(model: str, folder: str) -> None:
    """Logs that the class `model` is being compiled, and that the result will be in `folder`."""
    logger.info(
        "Compiling %s for this machine, once: about a minute, longer for a large model. Later "
        "starts load it from %s.",
        model,
        folder,
    )


NORM_PROVIDER = "vllm_dllm_cpu"
"""The kernel's name among vLLM's implementations of RMS norm."""


def _norm_supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether vLLM's C++ kernel computes a norm as vLLM defines it: only in fp32, since in 16-bit
    types it rounds once more, and over whole rows."""
    dtypes = {x.dtype} if weight is None else {x.dtype, weight.dtype}
    return variance_size is None and dtypes == {torch.float32}


def register_cpp_norm() -> None:
    """Adds vLLM's C++ kernel to vLLM's kinds of RMS norm, as `NORM_PROVIDER`. Repeatable."""
    if NORM_PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(NORM_PROVIDER, supports_args=_norm_supports)
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        x = x.contiguous()  # the kernel assumes that rows are adjacent
        output = torch.empty_like(x)
        cpp_rms_norm(output, x, weight, epsilon)
        return output


def prefer_cpp_norm(vllm_config: VllmConfig) -> None:
    """Puts `NORM_PROVIDER`, if registered, first for norms in `vllm_config`, in place."""
    if NORM_PROVIDER in ir.ops.rms_norm.impls:
        norms = vllm_config.kernel_config.ir_op_priority.rms_norm
        norms[:] = [NORM_PROVIDER, *(name for name in norms if name != NORM_PROVIDER)]
