"""Which engines and workers fork from the fork server, and the cores of a forked worker.

vLLM binds each thread of a worker to a core by variables that OpenMP's library reads when it is
loaded. A forked worker has loaded it already, so its threads share all of its cores. On two cores
that is faster. On machines with many cores it has not been measured, so workers are spawned as
before.
"""

import contextlib
import multiprocessing
import os

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_dllm.config.workers import CPU_IMPORTS, CPU_WORKER
from vllm_dllm.cpu import cores, fork_server
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat import engine_processes

logger = init_logger(__name__)


def install() -> None:
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
