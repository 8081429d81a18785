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
    "prefer_linear_kernel",
]


_LISTS = {
    "fp8": "_POSSIBLE_FP8_KERNELS",
    "int4": "_POSSIBLE_KERNELS",
    "int8": "_POSSIBLE_INT8_KERNELS",
}
"""Weights of linears -> vLLM's list of kernels for them."""


def prefer_linear_kernel(weights: str, kernel: type) -> None:
    """Makes vLLM try `kernel` first on CPUs for `weights`, a key of `_LISTS`: FP8, 4-bit or 8-bit
    integers. vLLM's `register_linear_kernel` would add it last. Repeatable."""
    insert_first(f"model_executor.kernels.linear:{_LISTS[weights]}", PlatformEnum.CPU, kernel)


class Fp32Int8LinearKernel(StockInt8LinearKernel):
    """vLLM's int8 kernel by oneDNN, for models in fp32. On a processor with AMX, vLLM chooses by
    the weights alone, and chooses an operation that only takes inputs in half precision."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if torch.get_default_dtype() != torch.float32:  # the model's type while it is built
            return False, "it is for models in fp32"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)
