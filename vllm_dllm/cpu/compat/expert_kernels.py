"""Kernels of unquantised experts on CPUs.

vLLM's CPU kernel ignores the expert map of expert parallelism: it got expert ids of all ranks, and
the first request ended the worker.
"""

import inspect
from functools import cache
from typing import Any

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUUnquantizedExperts as StockExperts,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from vllm_dllm.compat.patching import wrap

__all__ = ["FusedMoEConfig", "StockExperts", "prefer_expert_kernel", "with_local_experts"]

_APPLY = inspect.signature(StockExperts.apply)


@cache
def with_local_experts(stock: Any) -> Any:
    """Returns a subclass of the kernel class `stock` that computes this rank's experts and gives
    those of other ranks weight 0. vLLM's CPU kernels ignore the expert map."""

    class LocalExperts(stock):
        """The kernel `stock`, with an expert map that vLLM's own ignores."""

        def apply(self, *args: Any, **kwargs: Any) -> None:
            """Runs the kernel with this rank's numbers of experts, and weight 0 for experts of
            other ranks."""
            call = _APPLY.bind(self, *args, **kwargs)
            of_call = call.arguments
            if (expert_map := of_call["expert_map"]) is not None:
                own = expert_map[of_call["topk_ids"].long()]  # [T, k], -1 for those of other ranks
                of_call["topk_weights"] = of_call["topk_weights"].masked_fill(own < 0, 0.0)
                of_call["topk_ids"] = own.clamp(min=0).to(of_call["topk_ids"].dtype)
                of_call["expert_map"] = None
            super().apply(*call.args[1:], **call.kwargs)

    return LocalExperts


def prefer_expert_kernel(kernel: type[StockExperts]) -> None:
    """Patches vLLM to try `kernel` first for unquantised experts on CPUs, and then its own kernels,
    each as `with_local_experts` returns it. Repeatable."""

    @wrap("model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls")
    def classes(stock: Any, backend: UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        found: list[Any] = stock(backend)
        if backend != UnquantizedMoeBackend.CPU:
            return found
        return [kernel, *(with_local_experts(each) for each in found)]
