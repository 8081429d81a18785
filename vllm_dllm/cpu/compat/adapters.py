"""LoRA adapters on CPUs: batches of several adapters, and none for routed experts."""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_dllm.compat.patching import patch, wrap


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
