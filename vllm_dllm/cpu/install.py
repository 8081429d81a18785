"""Prepares a process on a CPU, and the configuration of a model that it serves: the worker, which
processes fork from the fork server, and the cores of a forked worker.

vLLM binds each thread of a worker to a core by variables that OpenMP's library reads when it is
loaded. A forked worker has loaded it already, so its threads share all of its cores. On two cores
that is faster. On machines with many cores it has not been measured, so workers are spawned as
before.
"""

import contextlib
import multiprocessing
import os
import re
from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_dllm.config.workers import CPU_IMPORTS, CPU_WORKER, cpu_variables
from vllm_dllm.cpu import compilation, cores, fork_server
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat import engine_processes, runner

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
    compilation.register_cpp_norm()
    runner.allow_v2_runner_without_triton(prepare)
    fork_processes()
    if cpu_cores.available_cpu_count() <= cores.SMALL_MACHINE_CORES:
        cpu_cores.shorten_busy_wait()


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


def fork_processes() -> None:
    """Makes engines and workers that this process starts fork, where they can, and lets our
    function choose the cores of an engine's workers. Repeatable."""
    if multiprocessing.parent_process() is not None:  # the user's process has no workers
        cpu_cores.set_core_choice(cores.choose_cores, CPU_WORKER)
    if fork_server.is_forked():
        if cpu_cores.available_cpu_count() <= cores.SMALL_MACHINE_CORES:
            engine_processes.set_worker_context(fork_server.ForkContext)
    else:
        engine_processes.set_engine_context(_fork_context)


def _fork_context(config: VllmConfig) -> engine_processes.Context | None:
    """Returns the context that the engine's processes are forked from, and starts the fork server
    if there is none. None leaves the processes to vLLM: the workers are not ours or are bound to
    memory, or nothing can fork here, which is logged."""
    parallel_config = config.parallel_config
    if parallel_config.worker_cls != CPU_WORKER or parallel_config.numa_bind:
        return None
    # Started by now, if this is `vllm serve` (`fork_server.start_early`).
    fork_server.ensure_running((*engine_processes.MODULES, *CPU_IMPORTS))
    obstacle = fork_server.find_fork_obstacle()
    if obstacle is None:
        return fork_server.ForkContext
    logger.info("The engine's processes import everything again, because %s.", obstacle)
    return None


def compute_on_chosen_cores() -> None:
    """Binds a forked worker to its cores, before it computes. Else does nothing. Raises ValueError
    if the user named cores that it may not use."""
    if fork_server.is_forked() and (chosen := engine_processes.worker_cores()):
        there = os.sched_getaffinity(0)
        # Linux leaves out cores that do not exist, and raises if none is left.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, chosen)
        if os.sched_getaffinity(0) != set(chosen):
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND must name cores that this process may use, among "
                f"{sorted(there)}, got {chosen}. Correct or unset it."
            )
        cores.set_num_threads(len(chosen))
