"""Which of vLLM's kernels multiplies a linear layer's inputs and weights."""

from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel as StockFp8LinearKernel,
)
from vllm.platforms import PlatformEnum

__all__ = ["StockFp8LinearKernel", "prefer_on_cpus"]


def prefer_on_cpus(kernel: type[StockFp8LinearKernel]) -> None:
    """Of FP8 kernels. `register_linear_kernel` would put it behind vLLM's. Repeatable."""
    kernels = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    if kernel not in kernels:
        kernels.insert(0, kernel)
