"""Model runner v2 on a CPU whose vLLM has no Triton.

vLLM's runner keeps its books in Triton kernels, and there is no Triton compiler for CPUs on the
package index. Here each kernel is replaced by native code of the same meaning; one that nobody
replaced runs in Triton's interpreter, and the log says so once. Nothing changes in a process until
a worker of model runner v2 starts in it (`worker.py`), so models served by runner v1 never meet
this code.
"""

import os
from typing import TYPE_CHECKING

from vllm_dllm.compat import runner, triton
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import norm

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


def prepare(config: "VllmConfig") -> None:
    """Completes the configuration of a model that runner v2 will run on this CPU."""
    if config.parallel_config.worker_cls == runner.STOCK_CPU_WORKER:
        config.parallel_config.worker_cls = CPU_WORKER
    # For the worker process, which inherits it: OpenMP threads that spin while they wait hold the
    # cores that the other threads need. Where another process was busy on two cores, a denoise
    # step took 200 ms with spinning and 12 ms without; the fastest steps of both were alike.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"
