"""Times a function as a server runs it: on a GPU in a CUDA graph, many times in a row."""

import time
from collections.abc import Callable

import torch

TIMES, ROUNDS = 5, 5


def timed_ms(run: Callable[[], object], device: str) -> float:
    """The best of some rounds, ms a call."""
    run()
    if device == "cpu":
        begun = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            run()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / TIMES)
    return min(found)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """A share of the expected values' size."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())
