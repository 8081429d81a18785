"""Kernels of linear layers that vLLM tries first on CPUs."""

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
    CPUInt8ScaledMMLinearKernel as StockInt8LinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel as StockFp8LinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import PlatformEnum

from vllm_dllm.compat.patching import insert_first

__all__ = [
    "Fp32Int8LinearKernel",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "StockFp8LinearKernel",
    "prefer_fp8_on_cpus",
    "prefer_int4_on_cpus",
    "prefer_int8_on_cpus",
]


def prefer_fp8_on_cpus(kernel: type[StockFp8LinearKernel]) -> None:
    """Has vLLM try `kernel` first for FP8 on CPUs; `register_linear_kernel` would add it last.
    Repeatable."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS", PlatformEnum.CPU, kernel)


def prefer_int4_on_cpus(kernel: type[MPLinearKernel]) -> None:
    """Has vLLM try `kernel` first for weights of 4-bit integers on CPUs. Repeatable."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_KERNELS", PlatformEnum.CPU, kernel)


def prefer_int8_on_cpus(kernel: type[StockInt8LinearKernel]) -> None:
    """Has vLLM try `kernel` first for weights and inputs of 8-bit integers on CPUs. Repeatable."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_INT8_KERNELS", PlatformEnum.CPU, kernel)


class Fp32Int8LinearKernel(StockInt8LinearKernel):
    """vLLM's int8 kernel by oneDNN, for models in fp32. On a processor with AMX, vLLM's own choice
    depends on the weights alone, and is an operation that only takes inputs in half precision."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if torch.get_default_dtype() != torch.float32:  # the model's type while it is built
            return False, "it is for models in fp32"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)
