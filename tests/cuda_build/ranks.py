"""The first of several ranks. It hears nothing of the others, whose tensors would be as unknown as
its own: what it exchanges with them has the right shapes."""

from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class FirstOfSeveral(UniProcExecutor):
    """Starts one worker, although there are to be more."""


class Communicator(CudaCommunicator):
    """Without NCCL and peers' memory, which vLLM would choose between."""

    ca_comm = fi_pcie_ipc_ar_comm = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        DeviceCommunicatorBase.__init__(self, *args, **kwargs)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        # As FlashInfer asserts it on machines with NVSwitch, which vLLM asks first.
        assert input_.shape[-1] * input_.element_size() % 16 == 0, input_.shape
        return torch.empty_like(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([input_] * self.world_size, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.all_gather(input_, dim) if self.rank_in_group == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor


def install() -> None:
    """In this process, for all that vLLM builds from now on."""
    distributed = torch.distributed
    start, add = distributed.init_process_group, distributed.new_group

    def start_alone(*_: Any, world_size: int, rank: int, **__: Any) -> None:
        start(backend="fake", store=FakeStore(), world_size=world_size, rank=rank)

    def add_alone(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return add(ranks, backend="fake")

    distributed.init_process_group, distributed.new_group = start_alone, add_alone
    parallel_state._node_count = lambda _: 1
    MessageQueue.create_from_process_group = lambda *_, **__: None
    name = f"{Communicator.__module__}.{Communicator.__name__}"
    type(current_platform).get_device_communicator_cls = classmethod(lambda _: name)
