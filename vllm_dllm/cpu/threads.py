"""How many threads a step computes with: all of the worker's, or one.

To share out an operation, threads have to be told and waited for, and a step of a small model is a
few hundred operations of some microseconds. Which steps gain depends on their work alone, so a step
of the same rows always has the same threads, and the same rounding.
"""

import multiprocessing
from collections.abc import Callable

import torch
from torch import nn

LEAST_WORK = 30_000_000
"""Products of a weight and a row, per layer on average, above which several threads are faster. On
two cores a second thread gained the shipped model (360,000 weights per layer) 4% at 64 rows, 30% at
256, 40% at 512 and 20% at 2,048; next to another busy process it cost half at 64 and at 512."""
LEAST_ROWS = 32
"""Reading the weights takes about as long as computing this many rows with them."""

# vLLM's worker forbids it once its threads are bound to cores; these stay where they are.
_set_num_threads = torch.set_num_threads


class StepThreads:
    def __init__(
        self,
        weights_per_layer: int,
        most: int,
        set_num_threads: Callable[[int], None] = _set_num_threads,
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


def of_worker(model: nn.Module, num_layers: int) -> StepThreads | None:
    """Returns None in the user's process, where other code has threads, too."""
    if multiprocessing.parent_process() is None or torch.get_num_threads() == 1:
        return None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return StepThreads(weights // num_layers, torch.get_num_threads())
