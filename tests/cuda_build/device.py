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
FINDS_ONE: dict[Any, Callable[[torch.Tensor], Any]] = {
    aten.nonzero.default: lambda x: _indices(x.dim()).unsqueeze(0),
    aten._unique2.default: lambda x: (x.new_empty(1), *(_indices(0) for _ in range(2))),
}
"""Operations that find as many as there are: one, here."""


Made = dict[int, StorageWeakRef]
"""Memory by its address, which none else has as long as this is kept."""


class Memory:
    """Tensors' memory: what was read that nobody inside had made, and where."""

    def __init__(self, made: Made) -> None:
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}
        self._made = made

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
    `compiled`: those that were compiled, in that order, a name for each variant.
    `compiled_by_cute`: how many of FlashAttention-4's this process has compiled. `tagged`: memory
    made while there was a `tag`, by its storage: the tag, and where; `lost`: what a sleep has lost
    of it (`gpu.py`). `answers`: the integer that copies to the host give, by the file of ours
    that asks for it, else 0."""

    def __init__(self) -> None:
        super().__init__()
        self._fake.shape_env = None
        self.implementations: dict[str, Callable[..., Any]] = {}
        self.forbidden: list[str] = []
        self.uncomputed: dict[str, int] = {}
        self.kernels: dict[str, int] = {}
        self.compiled: list[str] = []
        self.compiled_by_cute = 0
        self.is_capturing = False
        self.answers: dict[str, int] = {}
        self.tag: str | None = None
        self.tagged: dict[int, tuple[StorageWeakRef, str]] = {}
        self.lost: dict[int, str] = {}
        self._watchers: list[Memory] = []
        self._addresses: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next_address = 1 << 40

    def wait(self, what: str) -> None:
        super().wait(what)
        if self.is_capturing:
            self.forbidden.append(self.waits[-1])

    @contextmanager
    def watching(self, made: Made | None = None) -> Iterator[Memory]:
        memory = Memory({} if made is None else made)
        self._watchers.append(memory)
        try:
            yield memory
        finally:
            self._watchers.remove(memory)

    @contextmanager
    def tagging(self, tag: str | None) -> Iterator[None]:
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        for watcher in self._watchers:
            for tensor in fake:
                watcher.reads(tensor, fake_cuda._place)
        for tensor in fake if self.lost else ():
            if was := self.lost.get(storage_of(tensor)):
                self.forbidden.append(f"{was} is lost, and read at {fake_cuda._place()}")

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
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            pinned = args[0].clone()
            self.pin(pinned)
            return pinned
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _of_cuda(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if implementation := self.implementations.get(func._schema.name):
            with self:
                return implementation(*args, **kwargs)
        for tensor in _written(func, args, kwargs) if self.lost else ():
            self.lost.pop(storage_of(tensor), None)
        if not func.is_view:
            self.reads(tensors)
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # or PyTorch would compute with what it knows
        made = self._compute(func, tensors, args, kwargs)
        for each in tree_leaves(made):
            if isinstance(each, FakeTensor):
                each.constant = None
                self._made(each, tensors)
        return made

    def _scripted(self, made: Any) -> Any:
        if self.answers and _is_number_of_host(made):
            file = fake_cuda._place().rpartition(":")[0]
            if file in self.answers:
                made.fill_(self.answers[file])
        return made

    def _made(self, tensor: torch.Tensor, of: list[torch.Tensor]) -> None:
        if storage_of(tensor) in map(storage_of, of):
            return
        for watcher in self._watchers:
            watcher.makes(tensor)
        if self.tag is not None:
            kept = StorageWeakRef(tensor.untyped_storage())  # so that no address is used again
            place = fake_cuda._place(of_anybody=True)
            what = f"{self.tag}, {list(tensor.shape)} {tensor.dtype} made at {place}"
            self.tagged[storage_of(tensor)] = (kept, what)

    def _compute(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten.scalar_tensor.default:
            with self._fake:
                return torch.empty((), dtype=kwargs.get("dtype"), device=CUDA)
        if func is prims.device_put.default:
            self._copied(args[0], CUDA, False)
            with self._fake:
                return torch.empty_like(args[0], device=CUDA)
        try:
            return self._scripted(super()._of_cuda(func, tensors, args, kwargs))
        except DynamicOutputShapeException:
            if func not in FINDS_ONE:
                raise
            with self._fake:
                return FINDS_ONE[func](args[0])
        except (UnsupportedOperatorException, NotImplementedError):
            name = func._schema.name
            self.uncomputed[name] = self.uncomputed.get(name, 0) + 1
            if returns := compiled.RETURNS.get(name):
                with self._fake:
                    return returns(*args, **kwargs)
            if not func._schema.is_mutable:
                raise
            return _as_given(func, args)


def _indices(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=CUDA)


def _is_number_of_host(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and value.dtype in (torch.int32, torch.int64)
    )


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors of the device that an operation changes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (each for each in tree_leaves(given) if isinstance(each, FakeTensor))


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
