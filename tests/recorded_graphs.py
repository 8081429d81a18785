"""CUDA graphs on a CPU: what is launched while one is captured is launched again by each replay, on
the same memory. So a replay computes what the step would only if what it reads lies where it lay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Of PyTorch's operations, and of kernels that are `Recorded`."""

    recording: "RecordedGraph | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._launches: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        made = func(*args, **kwargs)
        given = {_memory(each) for each in _tensors((args, kwargs))}
        new = [each for each in _tensors(made) if _memory(each) not in given]
        if new or func._schema.is_mutable:

            def launch() -> None:
                again = func(*args, **kwargs)
                for old, each in zip(_tensors(made), _tensors(again), strict=True):
                    if _memory(old) not in given:
                        old.copy_(each)

            self._launches.append(launch)
        return made

    def launch(self, kernel: Callable[[], None]) -> None:
        with _disable_current_modes():
            kernel()
        self._launches.append(kernel)

    def replay(self) -> None:
        self.num_replays += 1
        for launch in self._launches:
            launch()


class Recorded:
    """A Triton kernel that graphs take."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            graph = RecordedGraph.recording
            if graph is None:
                self._kernel[grid](*args, **kwargs)
            else:
                graph.launch(lambda: self._kernel[grid](*args, **kwargs))

        return launch


@contextmanager
def capturing(*_: Any) -> Iterator[Callable[[Callable[[], Any]], tuple[RecordedGraph, Any]]]:
    """`compat.gpu.capture_graphs`."""

    def capture(run: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        graph = RecordedGraph.recording = RecordedGraph()
        with graph:
            made = run()
        RecordedGraph.recording = None
        return graph, made

    yield capture


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
