"""CUDA tensors that are not there, as in `tests/gpu_dry_run/fake_cuda.py`, for all that vLLM's CUDA
build does: its own operations, graphs, memory that sleeps.

An operation of vLLM in Python runs in Python, so that what it calls is seen. One that is compiled
computes nothing: where it fills tensors it was given, they stay as unknown as they were.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tests.cuda_build import compiled
from tests.gpu_dry_run import fake_cuda
from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda, aten

fake_cuda.STAND_INS.add(__file__)
prims = torch.ops.prims


class Memory:
    """Tensors' memory: what was read that nobody inside had made, and where."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}
        self._made: dict[int, StorageWeakRef] = {}  # kept, so that no address is used again

    def reads(self, tensor: torch.Tensor, place: Callable[[], str]) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self._made and storage.cdata not in self.read:
            self.read[storage.cdata] = (storage, f"{list(tensor.shape)} {tensor.dtype} {place()}")

    def makes(self, tensor: torch.Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self.read:
            self._made.setdefault(storage.cdata, storage)


class GpuDevice(FakeCuda):
    """`implementations`: vLLM's operations that are Python, by their name in its library.
    `forbidden`: what a CUDA graph under capture does not allow, and where. `uncomputed`: compiled
    operations that PyTorch knows no shapes of, how often. `kernels`: Triton's, how often launched;
    `compiled`: those that were compiled, in that order, a name for each variant."""

    def __init__(self) -> None:
        super().__init__()
        self._fake.shape_env = None
        self.implementations: dict[str, Callable[..., Any]] = {}
        self.forbidden: list[str] = []
        self.uncomputed: dict[str, int] = {}
        self.kernels: dict[str, int] = {}
        self.compiled: list[str] = []
        self.is_capturing = False
        self._watchers: list[Memory] = []
        self._addresses: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next_address = 1 << 40

    def wait(self, what: str) -> None:
        super().wait(what)
        if self.is_capturing:
            self.forbidden.append(self.waits[-1])

    @contextmanager
    def watching(self) -> Iterator[Memory]:
        memory = Memory()
        self._watchers.append(memory)
        try:
            yield memory
        finally:
            self._watchers.remove(memory)

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        for watcher in self._watchers:
            for tensor in tensors:
                if isinstance(tensor, FakeTensor):
                    watcher.reads(tensor, fake_cuda._place)

    def address(self, tensor: torch.Tensor) -> int:
        """One that no other memory has ever had."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self._addresses:
            size = tensor.untyped_storage().nbytes()
            self._addresses[storage.cdata] = (storage, self._next_address)
            self._next_address += (size + 512) // 512 * 512
        _, start = self._addresses[storage.cdata]
        return start + tensor.storage_offset() * tensor.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func is aten.is_pinned.default and not isinstance(args[0], FakeTensor):
            return self._is_pinned(args[0])
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            self.pin(pinned)
            return pinned
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _of_cuda(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if implementation := self.implementations.get(func._schema.name):
            with self:
                return implementation(*args, **kwargs)
        self.reads(tensors)
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # or PyTorch would compute with what it knows
        made = self._compute(func, tensors, args, kwargs)
        for each in tree_leaves(made):
            if isinstance(each, FakeTensor):
                each.constant = None
                for watcher in self._watchers:
                    watcher.makes(each)
        return made

    def _compute(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten.scalar_tensor.default:
            with self._fake:
                return torch.empty((), dtype=kwargs.get("dtype"), device=CUDA)
        if func is prims.device_put.default:
            self._copied(args[0], CUDA, False)
            with self._fake:
                return torch.empty_like(args[0], device=CUDA)
        try:
            return super()._of_cuda(func, tensors, args, kwargs)
        except DynamicOutputShapeException:
            if func is not aten.nonzero.default:
                raise
            with self._fake:  # one was found
                return torch.empty(1, args[0].dim(), dtype=torch.int64, device=CUDA)
        except (UnsupportedOperatorException, NotImplementedError):
            name = func._schema.name
            self.uncomputed[name] = self.uncomputed.get(name, 0) + 1
            if returns := compiled.RETURNS.get(name):
                with self._fake:
                    return returns(*args, **kwargs)
            if not func._schema.is_mutable:
                raise
            return _as_given(func, args)


def _as_given(func: Any, args: Any) -> Any:
    """What an operation returns that only fills what it was given."""
    returns = []
    for value in func._schema.returns:
        alias = value.alias_info
        if alias is None:
            raise NotImplementedError(f"{func} returns what nobody knows the shape of")
        (position,) = (
            i
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.before_set & alias.before_set
        )
        returns.append(args[position])
    if not returns:
        return None
    return returns[0] if len(returns) == 1 else tuple(returns)
