"""Which cores the model computes on, and with how many threads each step does.

vLLM reserves one for its other processes. They have little to do while the model computes, so on
two cores that gives half of the machine away: a denoise step of 267 million parameters took twice
as long. On a large machine a reserved core costs little, and spares the others the wait for
whichever is interrupted.

To share out an operation, threads have to be told and waited for, and a step of a small model is a
few hundred operations of some microseconds. Which steps gain depends on their work alone, so a step
of the same rows always has the same threads, and the same rounding.
"""

import multiprocessing
import os
from collections.abc import Callable

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_dllm.cpu.compat import cores as cpu_cores

logger = init_logger(__name__)

FEW_CORES = 8
"""Up to so many, none is reserved."""


def choose_cores(by_worker: list[list[int]]) -> list[list[int]]:
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


LEAST_WORK = 30_000_000
"""Products of a weight and a row, per layer on average, above which several threads are faster. On
two cores a second thread gained the shipped model (360,000 weights per layer) 4% at 64 rows, 30% at
256, 40% at 512 and 20% at 2,048; next to another busy process it cost half at 64 and at 512."""
LEAST_ROWS = 32
"""Reading the weights takes about as long as computing this many rows with them."""

set_num_threads = torch.set_num_threads
"""vLLM's worker forbids it once its threads are bound to cores; these stay where they are."""


class StepThreads:
    def __init__(
        self,
        weights_per_layer: int,
        most: int,
        set_num_threads: Callable[[int], None] = set_num_threads,
    ) -> None:
        self._least_rows = LEAST_WORK / max(1, weights_per_layer)
        self._most = most
        self._set_num_threads = set_num_threads
        self._used = most

    def choose(self, num_rows: int) -> None:
        """Sets the threads of the step to come, of so many tokens with those of canvases."""
        wanted = self._most if max(num_rows, LEAST_ROWS) >= self._least_rows else 1
        if wanted != self._used:
            self._set_num_threads(wanted)
            self._used = wanted


def threads_of_worker(model: nn.Module, num_layers: int) -> StepThreads | None:
    """Returns None in the user's process, where other code has threads, too."""
    if multiprocessing.parent_process() is None or torch.get_num_threads() == 1:
        return None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return StepThreads(weights // num_layers, torch.get_num_threads())
