"""Which cores the model computes on, how many threads each step uses, and what Linux says of the
processor.

vLLM reserves a core for its other processes, which have little to do while the model computes. On
two cores that wastes half of the machine: a denoise step of 267 million parameters took twice as
long. On a large machine a reserved core costs little, and no thread has to wait for one that is
interrupted.

To share an operation among threads takes time, and a step of a small model is a few hundred
operations of some microseconds. The number of threads depends only on the work of a step, so a step
of the same rows always rounds the same.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_dllm.cpu.compat import cores as cpu_cores

logger = init_logger(__name__)

SMALL_MACHINE_CORES = 8
"""Most cores of a machine on which no core is reserved."""


def choose_cores(by_worker: list[list[int]]) -> list[list[int]]:
    """Returns the ids of the cores that each worker computes on, and logs them. `by_worker`: the
    ids of the cores that each may have."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    wanted = int(asked) if asked.isdigit() else 0  # 0: none asked for
    share = cpu_cores.available_cpu_count() // len(by_worker)  # a quota may allow less than all
    chosen = [cores[: wanted or _num_compute_cores(len(cores), share)] for cores in by_worker]
    logger.info(
        "The model computes on core %s; steps too small to gain from several threads run on one. "
        "VLLM_CPU_OMP_THREADS_BIND names others; VLLM_CPU_NUM_OF_RESERVED_CPU and OMP_NUM_THREADS "
        "leave some out.",
        "; ".join(", ".join(map(str, cores)) for cores in chosen),
    )
    return chosen


def _num_compute_cores(num_cores: int, share: int) -> int:
    """Returns how many of `num_cores` cores to use. `share`: the CPUs that a worker may use."""
    if share < num_cores:  # threads that wait for one that used its quota up gain nothing
        return max(1, share)
    return num_cores if num_cores <= SMALL_MACHINE_CORES else num_cores - 1


MIN_WORK = 30_000_000
"""Least products of a weight and a row, per layer on average, for which several threads are faster.
On two cores a second thread gained the shipped model (360,000 weights per layer) 4% at 64 rows, 30%
at 256, 40% at 512 and 20% at 2,048; next to another busy process it cost half at 64 and at 512."""
MIN_ROWS = 32
"""Rows that a smaller step counts as: reading the weights takes as long as computing these."""

set_num_threads = torch.set_num_threads
"""PyTorch's own function. vLLM's worker replaces it by one that refuses once threads are bound to
cores, but these threads stay on their cores."""


class StepThreads:
    """Sets the number of threads for each step: all if the step's work is worth it, else one."""

    def __init__(
        self,
        weights_per_layer: int,
        most: int,
        set_num_threads: Callable[[int], None] = set_num_threads,
    ) -> None:
        """`most`: all threads, which are in use now. `weights_per_layer`: on average."""
        self._least_rows = MIN_WORK / max(1, weights_per_layer)
        self._most = most
        self._set_num_threads = set_num_threads
        self._used = most

    def set_for_step(self, num_rows: int) -> None:
        """Sets this process' threads for a step of `num_rows` tokens, canvases included."""
        wanted = self._most if max(num_rows, MIN_ROWS) >= self._least_rows else 1
        if wanted != self._used:
            self._set_num_threads(wanted)
            self._used = wanted


def make_step_threads(model: nn.Module, num_layers: int) -> StepThreads | None:
    """Returns the StepThreads of a worker with `model`. None if it has one thread, or runs in the
    user's own process, whose other code uses threads, too."""
    if multiprocessing.parent_process() is None or torch.get_num_threads() == 1:
        return None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return StepThreads(weights // num_layers, torch.get_num_threads())


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the names of this processor's extensions, sorted. `cpuinfo`: Linux' file of them."""
    if names := _value_of_first_processor(cpuinfo, ("flags", "Features")):  # on x86 and Arm
        return " ".join(sorted(names.split()))
    return str(sorted(torch.cpu.get_capabilities().items()))


def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the vendor, `AuthenticAMD` or `GenuineIntel`; "" if unknown, as on Arm."""
    return _value_of_first_processor(cpuinfo, ("vendor_id",)) or ""


def _value_of_first_processor(cpuinfo: Path, names: tuple[str, ...]) -> str | None:
    """Returns the value in the first line of `cpuinfo` that is about one of `names`, or None."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None
