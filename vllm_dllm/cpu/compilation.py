"""How a CPU runs the model's forward: compiled or as a flat trace, but not module by module.

With the shipped checkpoint at batch 1, a forward took 14 ms module by module, 9 ms as the flat list
of operations that Dynamo traces, and 6.5 ms compiled by Inductor, which needs a C++ compiler.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from vllm import ir
from vllm.config import CompilationMode, VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger

import vllm_dllm
from vllm_dllm.cpu.compat.ops import cpp_rms_norm

logger = init_logger(__name__)

MODEL_ROOMS = ("attention", "compat", "cpu", "drafters", "models", "quantization")


def has_compiler() -> bool:
    """Whether Inductor can build its kernels: it needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def choose_compilation(vllm_config: VllmConfig) -> None:
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
        prefer_norm(vllm_config)
    if config.backend == "eager":
        # The worker inherits this. With this backend vLLM stores nothing ahead of time,
        # yet would work out a key for it, 14 ms, at every forward.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def reuse_compiled_models(vllm_config: VllmConfig) -> None:
    """Lets this worker load what an earlier start compiled, if it would be the same. Repeatable."""
    from vllm_dllm.cpu.compat import compiled_models

    compiled_models.load_what_inductor_compiled()
    compiled_models.add_to_cache_key(vllm_config, cache_key())
    compiled_models.announce_compilation(_announce)


def cache_key() -> str:
    """What a compiled model depends on and vLLM's key lacks. That has the versions of vLLM and
    torch, the configurations, and the sources that are called in the forward: vLLM's, as ours shape
    the model when it is built."""
    return ", ".join(
        [
            sources(),
            f"{torch.get_num_threads()} threads",
            torch.backends.cpu.get_cpu_capability(),  # the vectors in the generated code
            platform.machine(),
            instruction_set(),  # what the compiler was free to use
        ]
    )


def sources(package: Path = Path(vllm_dllm.__path__[0])) -> str:
    """A digest of all our code that builds models."""
    digest = hashlib.sha256()
    for room in MODEL_ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The names of all extensions that this CPU has."""
    if names := _value_of_first_processor(cpuinfo, ("flags", "Features")):  # on x86 and Arm
        return " ".join(sorted(names.split()))
    return str(sorted(torch.cpu.get_capabilities().items()))


def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The vendor's name by the processor, `AuthenticAMD` or `GenuineIntel`; empty where unknown."""
    return _value_of_first_processor(cpuinfo, ("vendor_id",)) or ""


def _value_of_first_processor(cpuinfo: Path, names: tuple[str, ...]) -> str | None:
    """What it says of the first processor under one of these names."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None


def _announce(model: str, folder: str) -> None:
    logger.info(
        "Compiling %s for this machine, once: about a minute, longer for a large model. Later "
        "starts load it from %s.",
        model,
        folder,
    )


NORM_PROVIDER = "vllm_dllm_cpu"
"""Of RMS norm by vLLM's own C++ kernel, for models that are not compiled: run op by op, a norm is
six PyTorch kernels, and a layer of Gemma4 has up to ten norms."""


def _norm_supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    # In 16-bit types the kernel rounds once more than the definition does.
    dtypes = {x.dtype} if weight is None else {x.dtype, weight.dtype}
    return variance_size is None and dtypes == {torch.float32}


def register_norm() -> None:
    """Offers the kernel to vLLM's norm layers under the name `NORM_PROVIDER`. Repeatable."""
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


def prefer_norm(vllm_config: VllmConfig) -> None:
    """Makes the kernel the first choice for norms in `vllm_config`'s model, if registered."""
    if NORM_PROVIDER in ir.ops.rms_norm.impls:
        norms = vllm_config.kernel_config.ir_op_priority.rms_norm
        norms[:] = [NORM_PROVIDER, *(name for name in norms if name != NORM_PROVIDER)]
