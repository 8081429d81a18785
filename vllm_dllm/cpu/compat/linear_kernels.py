"""Which of vLLM's kernels multiplies a linear layer's inputs and weights."""

from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel as StockFp8LinearKernel,
)
from vllm.platforms import PlatformEnum

from vllm_dllm.compat.patching import put_first

__all__ = [
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "StockFp8LinearKernel",
    "prefer_fp8_on_cpus",
    "prefer_int4_on_cpus",
]


def prefer_fp8_on_cpus(kernel: type[StockFp8LinearKernel]) -> None:
    """`register_linear_kernel` would put it behind vLLM's. Repeatable."""
    put_first("model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS", PlatformEnum.CPU, kernel)


def prefer_int4_on_cpus(kernel: type[MPLinearKernel]) -> None:
    """The same for weights of 4-bit integers."""
    put_first("model_executor.kernels.linear:_POSSIBLE_KERNELS", PlatformEnum.CPU, kernel)
