import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.gpu_dry_run import fake_cuda as stand_ins
from tests.gpu_dry_run.fake_cuda import FakeCuda, Kernel

KERNELS = {
    "vllm.v1.worker.gpu.buffer_utils": ("_apply_write_kernel",),
    "vllm_dllm.denoise.draws_triton": ("_temperature_and_noise_kernel",),
    "vllm_dllm.denoise.vocab_stream_triton": ("_read_blocks_kernel", "_join_blocks_kernel"),
    "vllm_dllm.denoise.expected_embedding_triton": (
        "_add_kernel",
        "_add_needed_kernel",
        "_weigh_kernel",
    ),
    "vllm_dllm.step.uniform.condition_triton": (
        "_pre_norm_kernel",
        "_gate_kernel",
        "_post_norm_kernel",
    ),
    "vllm_dllm.step.uniform.settle_triton": ("_settle_kernel", "_store_soft_kernel"),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """With what vLLM and PyTorch ask of a machine with a GPU."""
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu import buffer_utils

    from vllm_dllm.models import vocabulary
    from vllm_dllm.step.runner import model_state

    device = stand_ins.fake_cuda()
    for name, kernels in KERNELS.items():
        __import__(name)
        for kernel in kernels:
            monkeypatch.setattr(sys.modules[name], kernel, Kernel(kernel))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", stand_ins.Event)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: True)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    view = "get_accelerator_view_from_cpu_tensor"
    monkeypatch.setattr(buffer_utils, view, stand_ins.view_of_host)
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(model_state, "build_attn_metadata", lambda **kwargs: kwargs)
    make = torch.tensor

    def pinned_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if pin_memory:
            device.pin(made)
        return made

    monkeypatch.setattr(torch, "tensor", pinned_tensor)
    # One copy, as of a tensor on a GPU; else each number is one.
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist())
    device.forget()
    with device, torch.inference_mode():
        yield device
