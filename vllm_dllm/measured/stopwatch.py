"""Times of kernels that should do the same, without those that fail or do something else."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

Name = TypeVar("Name", bound=str)
Clock = Callable[[Callable[[], Any]], float]
"""Runs something several times; ms of one run."""

EQUAL = 1.02  # a candidate is as fast as the best up to this ratio
_APART = 2.0**-5  # of a tensor's root mean square: what other orders of sums differ by in bf16 and
# in FP8 is far below it, and a wrong mask or tile far above


def gpu_clock(run: Callable[[], Any]) -> float:
    """The median, as steps run it: replayed from a CUDA graph, because the host takes longer to
    launch a layer's experts than the GPU to compute them, and each time with a cold L2 cache: in a
    step, other layers come between. `run` has run before."""
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=5, rep=20, return_mode="median"))


@dataclass(frozen=True)
class Stopwatch:
    clock: Clock = gpu_clock
    until: float = float("inf")  # of `time.monotonic`; nothing is timed afterwards

    @classmethod
    def for_seconds(cls, seconds: float, clock: Clock) -> "Stopwatch":
        return cls(clock, time.monotonic() + seconds)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def times(
        self, what: str, candidates: Mapping[Name, Callable[[], torch.Tensor]]
    ) -> dict[Name, float]:
        """ms of each candidate that runs and agrees with the first, which is the one in use; the
        log names the others. Empty where the first one does not run, or the time is over."""
        times: dict[Name, float] = {}
        expected: torch.Tensor | None = None
        for name, run in candidates.items():
            if self.is_over:
                return {}
            try:
                found = run().float().clone()
                if expected is not None and not _agree(found, expected):
                    logger.warning("%s: %s is left out, its result is another.", what, name)
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
    if found.shape != expected.shape or not found.isfinite().all():
        return False
    off = (found - expected).square().mean().sqrt()
    return bool(off <= _APART * expected.square().mean().sqrt())


def fastest(times: Mapping[Name, float]) -> Name:
    """The first of those that are as fast as the best."""
    best = min(times.values())
    return next(name for name, ms in times.items() if ms <= best * EQUAL)
