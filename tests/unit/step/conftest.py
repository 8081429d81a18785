"""Workers without an engine."""

from types import SimpleNamespace

import pytest
from vllm.v1.worker.cpu import buffer_utils as cpu_buffers
from vllm.v1.worker.gpu import buffer_utils as gpu_buffers

from tests.unit.cpu.kernel_inputs import kernel_of
from tests.unit.step.worker import GetWorker, Worker
from vllm_dllm.models import vocabulary


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: SimpleNamespace(world_size=1))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> GetWorker:
    kernel_of("buffer_utils._apply_write_kernel")  # the native one
    monkeypatch.setattr(gpu_buffers, "UvaBuffer", cpu_buffers.UvaBuffer)  # as its CPU worker does
    return Worker
