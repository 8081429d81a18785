"""Model runner v2 on a CPU whose vLLM has no Triton.

vLLM's runner does its bookkeeping in Triton kernels, and the package index has no Triton compiler
for CPUs. Here each kernel is replaced by native code that does the same. A kernel without a
replacement runs in Triton's interpreter, and the log says so once. Nothing changes in a process
until a worker of model runner v2 starts in it (`worker.py`), so models served by runner v1 never
meet this code.
"""

import os
from typing import TYPE_CHECKING

from vllm_dllm.compat import cpu_cores, runner, triton
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import cores, norm

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


def prepare(config: "VllmConfig") -> None:
    """Completes the configuration of a model that runner v2 will run on this CPU."""
    if config.parallel_config.worker_cls == runner.STOCK_CPU_WORKER:
        config.parallel_config.worker_cls = CPU_WORKER
    config.kernel_config.enable_jit_warmup = False  # there is nothing to compile
    # The engine inherits this. A worker that compiles does not answer for some minutes; vLLM would
    # say after one that processes hang. One that hangs while it serves is reported after 300 s.
    os.environ.setdefault("VLLM_RINGBUFFER_WARNING_INTERVAL", "600")
    # The worker process inherits this. OpenMP threads that spin while they wait hold cores that
    # other threads need. Next to another busy process on two cores, a denoise step took 200 ms with
    # spinning and 12 ms without; the fastest steps were the same.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"
