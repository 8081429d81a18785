"""Model runner v2 on a CPU whose vLLM has no Triton.

vLLM's runner keeps its books in Triton kernels, and there is no Triton compiler for CPUs on the
package index. Here each kernel is replaced by native code of the same meaning; one that nobody
replaced runs in Triton's interpreter, and the log says so once. Nothing changes in a process until
a worker of model runner v2 starts in it (`worker.py`), so models served by runner v1 never meet
this code.
"""

from vllm_dllm import compat


def is_needed() -> bool:
    """Whether this vLLM is a CPU build that cannot launch Triton kernels."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and not compat.has_triton()


def install() -> None:
    """Lets configurations of this process choose model runner v2. Repeatable."""
    if is_needed():
        compat.allow_v2_runner_without_triton("vllm_dllm.cpu.worker.TritonFreeCPUWorker")
