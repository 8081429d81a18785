"""What a process on a CPU does before it has a configuration, and when it has one."""

import os
from typing import TYPE_CHECKING

from vllm_dllm.config.workers import CPU_WORKER, cpu_variables
from vllm_dllm.cpu import compilation, cores, forks
from vllm_dllm.cpu.compat import engine_processes, runner
from vllm_dllm.cpu.compat.cores import available_cpu_count

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def install() -> None:
    """Lets configurations of this process, which is on a CPU, choose model runner v2. Repeatable,
    and nothing where vLLM can launch Triton kernels."""
    if runner.has_triton():
        return
    compilation.register_norm()
    runner.allow_v2_runner_without_triton(prepare)
    forks.install()
    if available_cpu_count() <= cores.FEW_CORES:
        engine_processes.fall_asleep_soon()


def prepare(config: "VllmConfig") -> None:
    """Completes the configuration of a model that runner v2 will run on this CPU."""
    if config.parallel_config.worker_cls == runner.STOCK_CPU_WORKER:
        config.parallel_config.worker_cls = CPU_WORKER
    config.kernel_config.enable_jit_warmup = False  # there is nothing to compile
    os.environ.update(cpu_variables(os.environ))  # the engine and its workers inherit it
