"""Engines and workers of our models fork from a server that has imported everything.

vLLM binds each thread of a worker to a core by variables that OpenMP's library reads when it is
loaded. A forked worker has loaded it, so its threads share all of its cores. On two cores that is
faster; on machines of many, where it has not been measured, workers are spawned as before.
"""

import multiprocessing
import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_dllm.config.workers import CPU_IMPORTS, CPU_WORKER
from vllm_dllm.cpu import cores, fork_server
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat import engine_processes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def install() -> None:
    """Has what this process starts fork, where it can. Repeatable."""
    if multiprocessing.parent_process() is not None:  # else it has no workers
        cpu_cores.choose_cores(cores.choose_cores, CPU_WORKER)
    if fork_server.is_forked():
        if cpu_cores.available_cpu_count() <= cores.FEW_CORES:
            engine_processes.start_workers(fork_server.ForkContext)
    else:
        engine_processes.start_engines(_fork_context)


def _fork_context(config: "VllmConfig") -> engine_processes.Context | None:
    """The context that the engine's processes are forked from. None: vLLM starts them as it does,
    because the workers are not ours or are bound to memory, or nothing can fork here."""
    parallel_config = config.parallel_config
    if parallel_config.worker_cls != CPU_WORKER or parallel_config.numa_bind:
        return None
    # Started by now, if this is `vllm serve` (`fork_server.start_early`).
    fork_server.start((*engine_processes.MODULES, *CPU_IMPORTS))
    obstacle = fork_server.obstacle()
    if obstacle is None:
        return fork_server.ForkContext
    logger.info("The engine's processes import everything anew, because %s.", obstacle)
    return None


def compute_on_chosen_cores() -> None:
    """Binds a forked worker to its cores, before it computes anything."""
    if fork_server.is_forked() and (chosen := engine_processes.worker_cores()):
        os.sched_setaffinity(0, chosen)
        cores.set_num_threads(len(chosen))
