"""Which cores the model computes on.

vLLM reserves one for its other processes. They have little to do while the model computes, so on
two cores that gives half of the machine away: a denoise step of 267 million parameters took twice
as long. On a large machine a reserved core costs little, and spares the others the wait for
whichever is interrupted.
"""

import os

from vllm.logger import init_logger

from vllm_dllm.cpu.compat import cores as cpu_cores

logger = init_logger(__name__)

FEW_CORES = 8
"""Up to so many, none is reserved."""


def choose(by_worker: list[list[int]]) -> list[list[int]]:
    """The cores that each worker computes on, of those on its memory node."""
    wanted = _threads_wanted()
    share = cpu_cores.available_cpu_count() // len(by_worker)  # less than there are under a quota
    chosen = [cores[: wanted or _num_used(len(cores), share)] for cores in by_worker]
    logger.info(
        "The model computes on core %s; steps too small to gain from several threads run on one. "
        "VLLM_CPU_OMP_THREADS_BIND names others; VLLM_CPU_NUM_OF_RESERVED_CPU and OMP_NUM_THREADS "
        "leave some out.",
        "; ".join(", ".join(map(str, cores)) for cores in chosen),
    )
    return chosen


def _num_used(num_cores: int, share: int) -> int:
    if share < num_cores:  # threads that wait for one that used its quota up gain nothing
        return max(1, share)
    return num_cores if num_cores <= FEW_CORES else num_cores - 1


def _threads_wanted() -> int | None:
    """The user's OMP_NUM_THREADS; of a list, one number for each level, the first counts."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
