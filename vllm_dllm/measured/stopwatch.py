"""Times kernels that should compute the same, and leaves out those that fail or do not."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

Name = TypeVar("Name", bound=str)
Clock = Callable[[Callable[[], Any]], float]
"""Runs a function several times and returns the ms of one run."""

EQUAL = 1.02  # a candidate counts as fast as the best up to this ratio
_APART = 2.0**-5  # share of a tensor's root mean square: another order of sums in bf16 or FP8
# differs by far less, and a wrong mask or tile by far more


def gpu_clock(run: Callable[[], Any]) -> float:
    """Returns the median time of `run` in ms, replayed from a CUDA graph and with a cold L2 cache,
    as in a step. Without a graph, the host takes longer to launch a layer's experts than the GPU to
    compute them. The cache is cold because other layers come in between. `run` must have run
    before."""
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=5, rep=20, return_mode="median"))


@dataclass(frozen=True)
class Stopwatch:
    """Times candidates until `until`."""

    clock: Clock
    until: float = float("inf")  # `time.monotonic()` after which nothing is timed

    @property
    def is_over(self) -> bool:
        """Returns whether the time for measurements is over."""
        return time.monotonic() >= self.until

    def time_candidates(
        self, what: str, candidates: Mapping[Name, Callable[[], torch.Tensor]]
    ) -> dict[Name, float]:
        """Returns the ms of each candidate that runs and agrees with the first one, which is in use
        now. Logs the others and why they are left out. Returns nothing if the first one does not
        run, or the time is over before all are timed. Waits for the device."""
        times: dict[Name, float] = {}
        expected: torch.Tensor | None = None
        for name, run in candidates.items():
            if self.is_over:
                return {}
            try:
                found = run().float().clone()
                if expected is not None and not _agree(found, expected):
                    logger.warning("%s: %s is left out, because its result differs.", what, name)
                    continue
                times[name] = self.clock(run)
            except Exception as error:  # whatever a compiler or a kernel raises
                logger.warning("%s: %s is left out: %s", what, name, error)
                if expected is None:
                    return {}
                continue
            expected = found if expected is None else expected
        return times


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two results differ by no more than rounding, judged by root mean squares."""
    if found.shape != expected.shape or not found.isfinite().all():
        return False
    off = (found - expected).square().mean().sqrt()
    return bool(off <= _APART * expected.square().mean().sqrt())


def fastest(times: Mapping[Name, float]) -> Name:
    """Returns the first candidate whose time is at most `EQUAL` times the best one."""
    best = min(times.values())
    return next(name for name, ms in times.items() if ms <= best * EQUAL)
