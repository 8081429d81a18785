"""Classes that vLLM's CPU platform names: its communicator, and its products with LoRA adapters.

Steps of ranks differ in size. With data parallelism, a layer of experts gathers the rows of all
ranks and returns to each rank its own sums. vLLM's communicator on CPUs can do neither: the first
request ended the server. With tensor parallelism, a step that is part of a prompt may have no row
to sample. There are no logits to gather then, and vLLM's gathering through shared memory divides by
their number.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_dllm.compat.patching import patch, wrap

Gathered = TypeVar("Gathered", Tensor, list[Tensor])


def use_uneven_communicator() -> None:
    """Patches vLLM: process groups of this worker use `UnevenCpuCommunicator`. Repeatable."""
    path = f"{__name__}.{UnevenCpuCommunicator.__name__}"
    patch(
        "platforms.cpu:CpuPlatform.get_device_communicator_cls",
        lambda stock: classmethod(lambda cls: path),
    )


class UnevenCpuCommunicator(CpuCommunicator):
    """vLLM's CPU communicator, with exchanges of different sizes, also empty ones. All ranks of the
    group must call a method together; each waits for the others."""

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Returns all ranks' `input_` concatenated along `dim`, without an exchange if it is
        empty."""
        if input_.numel():
            return super().all_gather(input_, dim)
        shape = list(input_.shape)
        shape[dim] *= self.world_size
        return input_.new_empty(shape)

    def all_gatherv(
        self, input_: Gathered, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Gathered:
        """Returns the rows of all ranks, one rank after another. `input_`: this rank's rows
        [sizes[rank], ...], or a list of such tensors, which returns a list. `sizes`: rows of each
        rank; None: all have as many as this one. Raises ValueError if `dim` is not 0."""
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
        """Returns this rank's rows [sizes[rank], ...] of the sum of all ranks' `input_` [sum of
        sizes, ...], which stays as it is. `sizes`: rows that each rank gets; None: all get as many.
        Raises ValueError if `dim` is not 0."""
        if dim:
            raise ValueError(f"Rows are scattered along dimension 0, got dim={dim}.")
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.contiguous().clone()  # Gloo has no sum that is scattered unevenly
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(list(sizes))[self.rank_in_group].contiguous()


def use_batched_adapters() -> None:
    """Patches vLLM: models that this worker loads compute adapters with `BatchedAdapters`, and
    refuse adapters of routed experts, for which vLLM has no kernels on CPUs. Repeatable."""
    path = f"{__name__}.{BatchedAdapters.__name__}"
    patch(
        "platforms.cpu:CpuPlatform.get_punica_wrapper", lambda stock: classmethod(lambda cls: path)
    )

    @wrap("lora.model_manager:get_supported_lora_modules")
    def without_experts(stock: Any, model: Any) -> list[str]:
        return [name for name in stock(model) if name != "experts"]


class BatchedAdapters(PunicaWrapperCPU):
    """Multiplies the rows of each adapter with its matrices. Rows without an adapter are left
    alone: vLLM multiplies them with the last adapter's."""

    def _apply_shrink(
        self,
        y: torch.Tensor,  # [rows, rank] fp32, zeros
        x: torch.Tensor,  # [rows, K]
        w_t_all: torch.Tensor,  # [adapters, 1, rank, K]
        scale: float,
    ) -> None:
        """Adds each row's product with its adapter's first matrix to `y`, and multiplies `y` by
        `scale`, in place. Does nothing if the batch uses no adapter."""
        if not self.no_lora:
            add_adapter_products(y, x, w_t_all, self.token_lora_indices)
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
        """Adds each row's product with its adapter's second matrix to `y_slice_size` columns of `y`
        from `y_offset` on, in place. Does nothing if the batch uses no adapter."""
        assert add_inputs, "all layers of models add to their output"
        if not self.no_lora:
            part = y[:, y_offset : y_offset + y_slice_size]
            add_adapter_products(part, x, w_t_all, self.token_lora_indices)


def add_adapter_products(
    out: torch.Tensor,  # [rows, N], added to in place
    x: torch.Tensor,  # [rows, K]
    weights: torch.Tensor,  # [adapters, N, K], or [adapters, 1, N, K]
    adapters: torch.Tensor,  # [rows] int64, each row's adapter; -1: none
) -> None:
    """Adds x @ weights[adapter].T, in the type of `out`, to each row of `out` with an adapter."""
    for adapter in adapters.unique().tolist():
        if adapter >= 0:
            rows = (adapters == adapter).nonzero()[:, 0]
            matrix = weights[adapter].flatten(0, -2).to(out.dtype)
            out.index_add_(0, rows, x[rows].to(out.dtype) @ matrix.T)
