"""What ranks exchange on CPUs, and vLLM's communicator there cannot.

In data parallelism steps differ in size. Experts are spread over the ranks, so a layer of experts
gathers the rows of all ranks and hands each its own sums back. vLLM's communicator on CPUs has
neither: the first request ended the server.

In tensor parallelism a step may have no row to sample, only a part of a prompt: then there are no
logits to gather, and vLLM's gathering through shared memory divides by their number.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

Gathered = TypeVar("Gathered", Tensor, list[Tensor])


def exchange_uneven_steps() -> None:
    """Gives vLLM's communicator on CPUs both operations, where it has none. Repeatable."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, operation in (("all_gatherv", all_gatherv), ("reduce_scatterv", reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, operation)


def gather_nothing() -> None:
    """Gathering tensors without elements leaves the output as it is. Repeatable."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    gather = _CPUSHMDistributed.all_gather_into_tensor
    if hasattr(gather, "__wrapped__"):
        return

    @wraps(gather)
    def gather_something(self: Any, output: Tensor, input: Tensor, group: Any = None) -> None:
        if input.numel():
            gather(self, output, input, group)

    _CPUSHMDistributed.all_gather_into_tensor = gather_something


def all_gatherv(
    self: Any, input_: Gathered, dim: int = 0, sizes: Sequence[int] | None = None
) -> Gathered:
    """The rows of all ranks, one after another; of rank r there are `sizes[r]`.

    Args:
        input_: this rank's rows [sizes[rank], ...], or several such tensors.
        dim: 0.
        sizes: rows of each rank; without, all have as many as this one.
    """
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    if dim:
        raise ValueError(f"Rows are gathered along dimension 0, got dim={dim}.")
    sizes = sizes or [len(input_)] * self.world_size
    # Gloo gathers tensors of one shape.
    sent = input_.new_zeros(max(sizes), *input_.shape[1:])
    sent[: len(input_)] = input_
    received = sent.new_empty(self.world_size * len(sent), *sent.shape[1:])
    torch.distributed.all_gather_into_tensor(received, sent, group=self.device_group)
    blocks = received.split(len(sent))
    return torch.cat([rows[:size] for rows, size in zip(blocks, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's rows [sizes[rank], ...] of the sum of all ranks' `input_` [sum of sizes, ...].

    Args:
        dim: 0.
        sizes: rows of each rank; without, all get as many.
    """
    if dim:
        raise ValueError(f"Rows are scattered along dimension 0, got dim={dim}.")
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()  # Gloo has no sum that is scattered unevenly
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].contiguous()
