"""Which of vLLM's kernels multiplies a linear layer's inputs and weights."""

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
    "Int8OfFloatsLinearKernel",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "StockFp8LinearKernel",
    "prefer_fp8_on_cpus",
    "prefer_int4_on_cpus",
    "prefer_int8_on_cpus",
]


def prefer_fp8_on_cpus(kernel: type[StockFp8LinearKernel]) -> None:
    """`register_linear_kernel` would put it behind vLLM's. Repeatable."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS", PlatformEnum.CPU, kernel)


def prefer_int4_on_cpus(kernel: type[MPLinearKernel]) -> None:
    """The same for weights of 4-bit integers."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_KERNELS", PlatformEnum.CPU, kernel)


def prefer_int8_on_cpus(kernel: type[StockInt8LinearKernel]) -> None:
    """The same for weights and inputs of 8-bit integers."""
    insert_first("model_executor.kernels.linear:_POSSIBLE_INT8_KERNELS", PlatformEnum.CPU, kernel)


class Int8OfFloatsLinearKernel(StockInt8LinearKernel):
    """Multiplies fp32 inputs. Where a processor has AMX, vLLM's own looks at the weights alone to
    choose an operation that takes inputs in half precision and no others."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if torch.get_default_dtype() != torch.float32:  # the model's, while that is made
            return False, "it is for models in fp32"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)
