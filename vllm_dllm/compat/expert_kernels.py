"""Which of vLLM's kernels computes a layer's experts, where they are not quantised."""

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUUnquantizedExperts as StockExperts,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

__all__ = ["FusedMoEConfig", "StockExperts", "prefer_on_cpus"]


def prefer_on_cpus(kernel: type[StockExperts]) -> None:
    """`kernel` is asked first whether it supports a layer. Repeatable."""
    stock_classes = unquantized.backend_to_kernel_cls

    if kernel in stock_classes(unquantized.UnquantizedMoeBackend.CPU):
        return

    def classes(backend: unquantized.UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        found = stock_classes(backend)
        return [kernel, *found] if backend == unquantized.UnquantizedMoeBackend.CPU else found

    unquantized.backend_to_kernel_cls = classes
