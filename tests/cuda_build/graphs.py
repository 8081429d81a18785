"""Streams, events and CUDA graphs that are not there. A graph remembers which memory it read that
was not its own: wherever it is replayed, that must still be the memory which is written to."""

from contextlib import contextmanager
from typing import Any

import torch

from tests.cuda_build.device import GpuDevice, Made, Memory
from tests.gpu_dry_run import fake_cuda

fake_cuda.STAND_INS.add(__file__)


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0
        self.device_type = 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cuda.Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _device().wait("a stream")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        _device().wait("an event")


class CUDAGraph:
    """`memory`: what it read while it was captured."""

    captured: list["CUDAGraph"] = []  # noqa: RUF012

    def __init__(self, *_: Any, **__: Any) -> None:
        self.memory: Memory | None = None
        self.num_replays = 0

    def capture_begin(self, *_: Any, **__: Any) -> None:
        _device().is_capturing = True
        self._watching = _device().watching(_made_by_parts())
        self.memory = self._watching.__enter__()

    def capture_end(self) -> None:
        self._watching.__exit__(None, None, None)
        _device().is_capturing = False
        CUDAGraph.captured.append(self)

    def replay(self) -> None:
        assert self.memory is not None, "replayed before it was captured"
        self.num_replays += 1
        gone = [at for storage, at in self.memory.read.values() if storage.expired()]
        if gone:
            _device().forbidden.append(f"a graph reads memory that was freed: {sorted(set(gone))}")
        lost = [_device().lost[each] for each in self.memory.read if each in _device().lost]
        if lost:
            _device().forbidden.append(f"a graph reads memory that a sleep lost: {sorted(lost)}")

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self.memory = None


def _made_by_parts() -> Made | None:
    """A step that is captured in parts: what one makes, the next may read, as their memory stays
    theirs."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    whole = BreakableCUDAGraphCapture.current()
    return None if whole is None else whole.__dict__.setdefault("made", {})


@contextmanager
def graph(made: CUDAGraph, *_: Any, **__: Any) -> Any:
    """`torch.cuda.graph`."""
    made.capture_begin()
    try:
        yield
    finally:
        made.capture_end()


_DEVICE: list[GpuDevice] = []


def _device() -> GpuDevice:
    return _DEVICE[0]


def install(device: GpuDevice) -> None:
    _DEVICE.append(device)
    stream = Stream()

    @contextmanager
    def on_stream(_: Any) -> Any:
        yield

    torch.cuda.Stream = torch.Stream = Stream
    torch.cuda.Event = torch.Event = Event
    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph
    torch.cuda.stream = on_stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: stream
    torch.accelerator.current_stream = lambda *_, **__: stream
    torch.cuda.set_stream = lambda _: None
    torch.cuda.graph_pool_handle = lambda: (0, 1)
    torch.cuda.is_current_stream_capturing = lambda: device.is_capturing
