"""Model runner v2 on a CPU whose vLLM has no Triton.

vLLM's runner does its bookkeeping in Triton kernels, and the package index has no Triton compiler
for CPUs. Here each kernel is replaced by native code that does the same. A kernel without a
replacement runs in Triton's interpreter, and the log says so once. Nothing changes in a process
until a worker of model runner v2 starts in it (`worker.py`), so models served by runner v1 never
meet this code.
"""

import os
from typing import TYPE_CHECKING

from vllm_dllm.compat import cpu_cores, engine_waits, runner, triton
from vllm_dllm.config.workers import CPU_WORKER, cpu_variables
from vllm_dllm.cpu import cores, forks, norm

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_needed() -> bool:
    """Whether this vLLM is a CPU build that cannot launch Triton kernels."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and not triton.has_triton()


def install() -> None:
    """Lets configurations of this process choose model runner v2. Repeatable."""
    if is_needed():
        norm.register()
        runner.allow_v2_runner_without_triton(prepare)
        cpu_cores.choose_cores(cores.choose, CPU_WORKER)
        forks.install()
        if cpu_cores.available_cpu_count() <= cores.FEW_CORES:
            engine_waits.fall_asleep_soon()


def prepare(config: "VllmConfig") -> None:
    """Completes the configuration of a model that runner v2 will run on this CPU."""
    if config.parallel_config.worker_cls == runner.STOCK_CPU_WORKER:
        config.parallel_config.worker_cls = CPU_WORKER
    config.kernel_config.enable_jit_warmup = False  # there is nothing to compile
    os.environ.update(cpu_variables(os.environ))  # the engine and its workers inherit it
