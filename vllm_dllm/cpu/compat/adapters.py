"""LoRA adapters on CPUs."""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_dllm.compat.patching import replace


def serve_batches() -> None:
    """Models that this process, a worker, loads compute adapters with `BatchedAdapters`, and leave
    routed experts to the base model: vLLM has kernels for their adapters on GPUs alone. Adapters
    that change them are refused when they are loaded. Repeatable."""
    path = f"{__name__}.{BatchedAdapters.__name__}"
    replace(
        "platforms.cpu:CpuPlatform.get_punica_wrapper", lambda stock: classmethod(lambda cls: path)
    )

    def without_experts(stock: Any) -> Any:
        return lambda model: [name for name in stock(model) if name != "experts"]

    replace("lora.model_manager:get_supported_lora_modules", without_experts)


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
