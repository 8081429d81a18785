"""CUDA tensors that are not there, so that code for a GPU runs without one and without vLLM's CUDA
build.

CUDA tensors are `FakeTensor`s, CPU tensors are real. Whatever would make the host wait for the
device, or mixes tensors of both, is written down with the line of ours that did it. What the device
would compute stays unknown: a copy to the host gives zeros.
"""

import ctypes
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from tests.paths import ROOT

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten._unsafe_view.default,
}
COMPARISONS = {aten.equal.default, aten.allclose.default}
# The guards of all kinds of devices, and two of them (c10/core/DeviceType.h).
_GUARDS, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 1, 14
STAND_INS = {__file__, str(Path(__file__).parent / "conftest.py")}
OURS = tuple(f"{ROOT / package}/" for package in ("vllm_dllm", "attention_kernels"))


class FakeCuda(TorchDispatchMode):
    """`waits`: what the host waited for, and where. `copies`: where something went to the device
    without anybody waiting. `launches`: our kernels and PyTorch's operations that compute; some of
    the latter, as sorting, are several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
        self.launches: list[str] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that none is used again

    def __enter__(self) -> "FakeCuda":
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` copies, too
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        leaves = arg_tree_leaves(*args, **kwargs)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if not any(map(_on_cuda, tensors)) and not any(map(_is_cuda_device, leaves)):
            made = func(*args, **kwargs)
            if is_pinned:
                self.pin(made)
            return made
        if func is aten.is_pinned.default:
            return False
        if _is_composite(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return self._of_cuda(func, tensors, args, kwargs)

    def forget(self) -> None:
        for log in (self.waits, self.copies, self.launches):
            log.clear()

    def pin(self, tensor: torch.Tensor) -> None:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor

    def wait(self, what: str) -> None:
        self.waits.append(f"{what} at {_place()}")

    def _of_cuda(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten._to_copy.default:
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            asynchronous = kwargs.pop("non_blocking", False)
            self._copied(source, target, asynchronous)
            self.launches.append(str(func))
            if target.type == "cpu":
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            with self._fake:
                dtype = kwargs.get("dtype") or source.dtype
                return torch.empty_like(source, dtype=dtype, device=CUDA)
        if func is aten.copy_.default:
            asynchronous = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
            self._copied(args[1], args[0].device, asynchronous)
            self.launches.append(str(func))
            return args[0].zero_() if args[0].device.type == "cpu" else args[0]
        if func is aten._local_scalar_dense.default:
            self.wait("item()")
            return torch.zeros((), dtype=args[0].dtype).item()
        if func in COMPARISONS:
            self.wait(str(func))
            return True
        mixed = [each for each in tensors if not _on_cuda(each) and each.dim() > 0]
        if mixed:
            self.waits.append(f"CPU and CUDA tensors mixed by {func} at {_place()}")
        if func.namespace == "aten" and not func.is_view and func not in ALLOCATIONS:
            self.launches.append(str(func))
        try:
            with self._fake:
                return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self.wait(f"a shape that depends on values, of {func},")
            raise

    def _copied(self, source: torch.Tensor, target: torch.device, asynchronous: bool) -> None:
        if source.device.type == target.type:
            return
        to_host = target.type == "cpu"
        if not asynchronous:
            self.wait(f"a copy to the {'host' if to_host else 'device'}")
        elif not to_host and source.numel() and not self._is_pinned(source):
            self.wait("a copy from memory that is not pinned")
        elif not to_host:
            self.copies.append(_place())

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


@cache
def fake_cuda() -> FakeCuda:
    """One for the process: what the code keeps from step to step belongs to it."""
    _guard_nothing()
    return FakeCuda()


def _guard_nothing() -> None:
    """PyTorch chooses the current device before each operation. A CPU build has nothing that could:
    the meta device's guard, which does nothing, takes its place."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    table = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    table[_CUDA] = table[_CUDA] or table[_META]
    torch._C._ensureCUDADeviceGuardSet()  # of a CUDA build without a GPU


class Kernel:
    """Stands in for a Triton kernel: checks what it is given, and computes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> "Kernel":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        device = fake_cuda()
        device.launches.append(self.name)
        for each in arg_tree_leaves(*args, **kwargs):
            if isinstance(each, torch.Tensor) and not _on_cuda(each):
                device.wait(f"{self.name} is given a CPU tensor")


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        fake_cuda().wait("an event")


def view_of_host(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory as the device sees it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


def _on_cuda(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _is_cuda_device(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "cuda"


def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), key
    )


def _place(*, of_anybody: bool = False) -> str:
    """The innermost line of ours, or of whoever called; or that of anybody but PyTorch."""
    frames = [f for f in traceback.extract_stack() if f.filename not in STAND_INS]
    ours = [f for f in frames if f.filename.startswith(OURS) and not of_anybody]
    frame = (ours or [f for f in frames if "/torch/" not in f.filename])[-1]
    return f"{frame.filename.removeprefix(str(ROOT) + '/')}:{frame.lineno}"
