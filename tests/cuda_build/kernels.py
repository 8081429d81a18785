"""Triton's launches without a GPU: each kernel is compiled for the chip with the arguments that it
is given, down to machine code, and not run."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tests.cuda_build.device import GpuDevice
from tests.gpu_dry_run import fake_cuda

fake_cuda.STAND_INS.add(__file__)


class Pointer:
    """A tensor, as far as the compiler cares. Allocations are aligned; views may not be."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class Driver:
    """Triton's driver of the chip."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return divmod(self._target.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def install(device: GpuDevice, capability: tuple[int, int]) -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    driver.set_active(Driver(GPUTarget("cuda", 10 * capability[0] + capability[1], 32)))
    compile_ = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = self.fn.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device.launches.append(name)
        device.kernels[name] = device.kernels.get(name, 0) + 1
        device.reads(tensors)
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            device.wait(f"{name} is given a CPU tensor")
        compiled = self.device_caches[0][0]
        number = len(compiled)
        compile_(self, *_pointers(args), grid=grid, warmup=True, **_pointers(kwargs))
        if len(compiled) > number:
            device.compiled.append(name)

    def launch_first(self: Any, *args: Any, **kwargs: Any) -> None:
        """Which configuration is best, only a GPU can tell."""
        chosen = self.configs[0]
        self.fn.run(*args, **kwargs, **chosen.all_kwargs())

    JITFunction.run = launch
    Autotuner.run = launch_first


def _pointers(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _pointers(value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(map(_pointers, values))
    return Pointer(values) if isinstance(values, torch.Tensor) else values
