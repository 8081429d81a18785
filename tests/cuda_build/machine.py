"""What PyTorch and vLLM ask of a machine with a GPU, answered for one that is not there."""

import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from tests.cuda_build import graphs, kernels
from tests.cuda_build.device import GpuDevice
from tests.gpu_dry_run.fake_cuda import CUDA, _guard_nothing

GIB = 1 << 30
Capability = tuple[int, int]
FLASH_ATTENTION_4 = {  # what it reads of the environment when it is imported, where ours runs it
    (9, 0): {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
}


class Chip(SimpleNamespace):
    """`shared`: bytes of shared memory that a block of threads may ask for."""

    name: str
    memory: int
    multiprocessors: int
    shared: int


CHIPS: dict[Capability, Chip] = {
    (8, 0): Chip(
        name="NVIDIA A100-SXM4-80GB", memory=80 * GIB, multiprocessors=108, shared=163 * 1024
    ),
    (9, 0): Chip(
        name="NVIDIA H100 80GB HBM3", memory=80 * GIB, multiprocessors=132, shared=227 * 1024
    ),
    (10, 0): Chip(name="NVIDIA B200", memory=180 * GIB, multiprocessors=148, shared=227 * 1024),
    (12, 0): Chip(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        memory=96 * GIB,
        multiprocessors=188,
        shared=99 * 1024,
    ),
}


class Host(NamedTuple):
    """A machine. `settings`: variables of its environment, which vLLM reads when it is imported."""

    capability: Capability
    num_gpus: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    name: str = ""  # of its GPU; none: that of the chip

    def __str__(self) -> str:
        several = "" if self.num_gpus == 1 else f"{self.num_gpus} x "
        return several + "sm_{}{}".format(*self.capability)


A100, H100, B200, RTX = (Host(capability) for capability in CHIPS)
H200 = H100._replace(name="NVIDIA H200")


def install(host: Host) -> GpuDevice:
    """For good: the process must not have imported vLLM yet."""
    capability, num_gpus, settings, name = host
    chip, device = CHIPS[capability], GpuDevice()
    chip.name = name or chip.name
    torch._C._ensureCUDADeviceGuardSet()
    _guard_nothing()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile CUDA
        **FLASH_ATTENTION_4.get(capability, {}),
        **dict(settings),
    }
    _answer_torch(capability, chip, num_gpus)
    graphs.install(device)
    kernels.install(device, capability)
    FakeTensor.data_ptr = lambda tensor: device.address(tensor)
    make = torch.tensor
    _device_constructors()  # remembers functions, and the one replaced here is to be among them

    def pinned_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if pin_memory:
            device.pin(made)
        return made

    torch.tensor = pinned_tensor
    _install_in_vllm(device)
    return device


def _answer_torch(capability: Capability, chip: Chip, num_gpus: int) -> None:
    properties = SimpleNamespace(
        name=chip.name,
        major=capability[0],
        minor=capability[1],
        total_memory=chip.memory,
        multi_processor_count=chip.multiprocessors,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=chip.shared,
        shared_memory_per_multiprocessor=chip.shared + 1024,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="GPU-0",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
        clock_rate=1_980_000,
    )
    free = (chip.memory - GIB, chip.memory)
    _replace(
        torch.cuda,
        is_available=True,
        _is_compiled=True,
        device_count=num_gpus,
        _device_count_nvml=num_gpus,
        current_device=0,
        set_device=None,
        get_device_capability=capability,
        get_device_name=chip.name,
        get_device_properties=properties,
        is_initialized=False,
        _lazy_init=None,
        init=None,
        mem_get_info=free,
        synchronize=None,
        empty_cache=None,
        is_bf16_supported=True,
        memory_allocated=0,
        memory_reserved=0,
        max_memory_allocated=0,
        reset_peak_memory_stats=None,
        current_blas_handle=0,
        get_sync_debug_mode=0,
        set_sync_debug_mode=None,
        can_device_access_peer=True,
    )
    _replace(
        torch.accelerator,
        is_available=True,
        device_count=num_gpus,
        current_accelerator=torch.device("cuda"),
        current_device_index=0,
        set_device_index=None,
        synchronize=None,
        empty_cache=None,
        empty_host_cache=None,
        get_memory_info=free,
        memory_stats={},
        memory_allocated=0,
        memory_reserved=0,
        max_memory_allocated=0,
        max_memory_reserved=0,
        reset_peak_memory_stats=None,
    )

    @contextmanager
    def any_device(*_: Any) -> Any:
        yield

    torch.accelerator.device_index = any_device
    torch.cuda.device = any_device
    # Its other answer would have vLLM ask PyTorch's allocator.
    torch.cuda.memory.get_allocator_backend = lambda: "of no GPU"


def _replace(module: Any, **answers: Any) -> None:
    def answering(answer: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: answer

    for name, answer in answers.items():
        setattr(module, name, answering(answer))


def _install_in_vllm(device: GpuDevice) -> None:
    """Before any module of vLLM takes what is replaced here by name."""
    import vllm.platforms as platforms

    def is_there() -> str:
        return "vllm.platforms.cuda.CudaPlatform"

    platforms.builtin_platform_plugins["cuda"] = platforms.cuda_platform_plugin = is_there
    from vllm.utils import platform_utils

    _replace(platform_utils, is_uva_available=True, is_pin_memory_available=True)
    from vllm.utils import torch_utils

    for name in ("is_uva_available", "is_pin_memory_available"):
        if hasattr(torch_utils, name):
            setattr(torch_utils, name, getattr(platform_utils, name))

    def view_of_host(tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory as the device sees it, which no sleep takes away."""
        with device.tagging(None):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)

    torch_utils.get_accelerator_view_from_cpu_tensor = view_of_host
    register = torch_utils.direct_register_custom_op

    def register_and_keep(
        op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        device.implementations[f"vllm::{op_name}"] = op_func
        register(op_name, op_func, *args, **kwargs)

    torch_utils.direct_register_custom_op = register_and_keep
    from vllm.platforms import current_platform

    type(current_platform).dist_backend = "gloo"  # one rank talks to nobody
