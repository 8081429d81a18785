"""Prepares a process on a CPU, and the configuration of a model that it serves."""

import os
import re
from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_dllm.config.workers import CPU_WORKER, cpu_variables
from vllm_dllm.cpu import cores, forks, norm
from vllm_dllm.cpu.compat import runner
from vllm_dllm.cpu.compat.cores import available_cpu_count, shorten_busy_wait

logger = init_logger(__name__)

_CORES = r"\d+(-\d+)?(,\d+(-\d+)?)*"
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": (r"\d+", "a whole number of GiB"),
    "VLLM_CPU_OMP_THREADS_BIND": (
        rf"auto|nobind|{_CORES}(\|{_CORES})*",
        "ids of cores, such as 0-3,6 (with | between workers), auto or nobind",
    ),
}
"""Variable that vLLM reads on a CPU -> pattern of its values, and what completes "must be"."""


def check_variables(environment: Mapping[str, str]) -> None:
    """Raises ValueError if a variable has a value that vLLM cannot read. Its own error names no
    variable."""
    for name, (pattern, expected) in _VARIABLES.items():
        value = environment.get(name, "")
        if value and not re.fullmatch(pattern, value.replace(" ", "")):
            raise ValueError(f"{name} must be {expected}, got {value!r}. Correct or unset it.")


def install() -> None:
    """Lets configurations of this process choose model runner v2, and its processes fork. On small
    machines also shortens polling. Does nothing where vLLM has Triton. Repeatable."""
    if runner.has_triton():
        return
    norm.register_cpp_norm()
    runner.allow_v2_runner_without_triton(prepare)
    forks.install()
    if available_cpu_count() <= cores.SMALL_MACHINE_CORES:
        shorten_busy_wait()


def prepare(config: VllmConfig) -> None:
    """Sets worker class and warm-up of a model that runner v2 will run on this CPU, in `config`,
    and variables in this process' environment, which the engine and its workers inherit. Raises
    ValueError for a drafter's target with recurrent layers, which would answer wrongly."""
    if config.speculative_config is not None and config.model_config.is_hybrid:
        raise ValueError(
            "A target with recurrent layers cannot have a drafter on a CPU: its answers would "
            "change. Leave --speculative-config out, or use a GPU."
        )
    if config.parallel_config.worker_cls == runner.STOCK_CPU_WORKER:
        config.parallel_config.worker_cls = CPU_WORKER
    config.kernel_config.enable_jit_warmup = False  # there is nothing to compile
    if config.parallel_config.enable_batch_sharded_sampling:
        logger.warning("--enable-batch-sharded-sampling is off: CPU ranks cannot gather tokens.")
        config.parallel_config.enable_batch_sharded_sampling = False
    os.environ.update(cpu_variables(os.environ))  # the engine and its workers inherit it
