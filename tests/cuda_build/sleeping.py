"""vLLM's allocator for servers that sleep, without memory: what was allocated under which tag, and
so what a sleep loses. Reading that again, before anybody has written it, is forbidden.

What a kernel is given counts as read, as nobody knows what it only writes. Whatever is written in
part counts as written.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cuda_build.device import GpuDevice

SCRATCH = "workspace"
"""vLLM's tag of what an operation writes before it reads it."""
COUNTS = "vllm/v1/worker/gpu/sample/penalties.py"
"""vLLM counts the tokens of all requests, and begins at 0 with each that asks for penalties."""


class Allocator:
    """Stands in for vLLM's `CuMemAllocator`."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        with self.device.tagging(tag or "default"):
            yield

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        with self.use_memory_pool("cudagraph"):
            yield (0, 2)

    def get_current_usage(self) -> int:
        """vLLM asks whether it is 0: allocations, not bytes."""
        return len(self.device.tagged)

    def sleep(self, offload_tags: tuple[str, ...] = ()) -> None:
        for storage, (_, what) in self.device.tagged.items():
            if what.partition(",")[0] in (SCRATCH, *offload_tags) or COUNTS in what:
                continue
            self.device.lost[storage] = what

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


def install(device: GpuDevice) -> None:
    """In this process."""
    from vllm.device_allocator import cumem
    from vllm.platforms import current_platform

    allocator = Allocator(device)
    cumem.CuMemAllocator.get_instance = staticmethod(lambda: allocator)
    type(current_platform).is_cumem_allocator_available = lambda _: True
