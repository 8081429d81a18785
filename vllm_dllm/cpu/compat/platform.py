"""Classes of ours that vLLM's platform for CPUs names: of what ranks exchange, and of LoRA
adapters.

In data parallelism steps differ in size. Experts are spread over the ranks, so a layer of experts
gathers the rows of all ranks and hands each its own sums back. vLLM's communicator on CPUs has
neither: the first request ended the server.

In tensor parallelism a step may have no row to sample, only a part of a prompt: then there are no
logits to gather, and vLLM's gathering through shared memory divides by their number.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_dllm.compat.patching import patch

Gathered = TypeVar("Gathered", Tensor, list[Tensor])


def exchange_uneven_steps() -> None:
    """Ranks of this process' groups exchange with `CpuRanks`. Repeatable."""
    path = f"{__name__}.{CpuRanks.__name__}"
    patch(
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


def serve_batches_of_adapters() -> None:
    """Models that this process, a worker, loads compute adapters with `BatchedAdapters`, and leave
    routed experts to the base model: vLLM has kernels for their adapters on GPUs alone. Adapters
    that change them are refused when they are loaded. Repeatable."""
    path = f"{__name__}.{BatchedAdapters.__name__}"
    patch(
        "platforms.cpu:CpuPlatform.get_punica_wrapper", lambda stock: classmethod(lambda cls: path)
    )

    def without_experts(stock: Any) -> Any:
        return lambda model: [name for name in stock(model) if name != "experts"]

    patch("lora.model_manager:get_supported_lora_modules", without_experts)


class BatchedAdapters(PunicaWrapperCPU):
    """Multiplies the rows of each adapter with its matrices, and leaves rows of none alone: vLLM's
    takes the last adapter there."""

    def _apply_shrink(
        self,
        y: torch.Tensor,  # [rows, rank] fp32, zeros
        x: torch.Tensor,  # [rows, K]
        w_t_all: torch.Tensor,  # [adapters, 1, rank, K]
        scale: float,
    ) -> None:
        if not self.no_lora:
            add_product(y, x, w_t_all, self.token_lora_indices)
            y.mul_(scale)

    def _apply_expand(
        self,
        y: torch.Tensor,  # [rows, N]
        x: torch.Tensor,  # [rows, rank] fp32
        w_t_all: torch.Tensor,  # [adapters, 1, y_slice_size, rank]
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        assert add_inputs, "no layer of a model's asks for less"
        if not self.no_lora:
            part = y[:, y_offset : y_offset + y_slice_size]
            add_product(part, x, w_t_all, self.token_lora_indices)


def add_product(
    out: torch.Tensor,  # [rows, N], added to in place
    x: torch.Tensor,  # [rows, K]
    weights: torch.Tensor,  # [adapters, N, K], or [adapters, 1, N, K]
    adapters: torch.Tensor,  # [rows] int64 of each row; -1: none
) -> None:
    """Adds x @ weights[adapter].T of each row, in the type of `out`."""
    for adapter in adapters.unique().tolist():
        if adapter >= 0:
            rows = (adapters == adapter).nonzero()[:, 0]
            matrix = weights[adapter].flatten(0, -2).to(out.dtype)
            out.index_add_(0, rows, x[rows].to(out.dtype) @ matrix.T)
