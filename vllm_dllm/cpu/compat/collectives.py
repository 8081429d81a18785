"""What ranks exchange on CPUs, and vLLM's communicator there cannot.

In data parallelism steps differ in size. Experts are spread over the ranks, so a layer of experts
gathers the rows of all ranks and hands each its own sums back. vLLM's communicator on CPUs has
neither: the first request ended the server.

In tensor parallelism a step may have no row to sample, only a part of a prompt: then there are no
logits to gather, and vLLM's gathering through shared memory divides by their number.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from vllm_dllm.compat.patching import replace

Gathered = TypeVar("Gathered", Tensor, list[Tensor])


def exchange_uneven_steps() -> None:
    """Ranks of this process' groups exchange with `CpuRanks`. Repeatable."""
    path = f"{__name__}.{CpuRanks.__name__}"
    replace(
        "platforms.cpu:CpuPlatform.get_device_communicator_cls",
        lambda stock: classmethod(lambda cls: path),
    )


class CpuRanks(CpuCommunicator):
    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        if input_.numel():
            return super().all_gather(input_, dim)
        shape = list(input_.shape)
        shape[dim] *= self.world_size
        return input_.new_empty(shape)

    def all_gatherv(
        self, input_: Gathered, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Gathered:
        """The rows of all ranks, one after another; of rank r there are `sizes[r]`.

        Args:
            input_: this rank's rows [sizes[rank], ...], or several such tensors.
            dim: 0.
            sizes: rows of each rank; without, all have as many as this one.
        """
        if isinstance(input_, list):
            return [self.all_gatherv(tensor, dim, sizes) for tensor in input_]
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
        self, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """This rank's rows [sizes[rank], ...] of the sum of all ranks' `input_`.

        Args:
            input_: [sum of sizes, ...].
            dim: 0.
            sizes: rows of each rank; without, all get as many.
        """
        if dim:
            raise ValueError(f"Rows are scattered along dimension 0, got dim={dim}.")
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.contiguous().clone()  # Gloo has no sum that is scattered unevenly
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(list(sizes))[self.rank_in_group].contiguous()
