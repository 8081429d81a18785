"""Kernels of linear layers and of unquantised experts that vLLM tries first on CPUs.

vLLM's CPU kernel of experts ignores the expert map of expert parallelism: it got expert ids of all
ranks, and the first request ended the worker.
"""

import inspect
from functools import cache
from typing import Any

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
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUUnquantizedExperts as StockExperts,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.platforms import PlatformEnum

from vllm_dllm.compat.patching import insert_first, wrap

__all__ = [
    "FusedMoEConfig",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "StockExperts",
    "StockFp8LinearKernel",
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


_APPLY = inspect.signature(StockExperts.apply)


@cache
def with_local_experts(stock: Any) -> Any:
    """Returns a subclass of the kernel class `stock` that computes this rank's experts and gives
    those of other ranks weight 0. vLLM's CPU kernels ignore the expert map."""

    class LocalExperts(stock):
        def apply(self, *args: Any, **kwargs: Any) -> None:
            """Runs vLLM's kernel with this rank's numbers of experts in place of `expert_map`."""
            call = _APPLY.bind(self, *args, **kwargs)
            named = call.arguments
            if (expert_map := named["expert_map"]) is not None:
                own = expert_map[named["topk_ids"].long()]  # [T, k], -1 for experts of other ranks
                named["topk_weights"] = named["topk_weights"].masked_fill(own < 0, 0.0)
                named["topk_ids"] = own.clamp(min=0).to(named["topk_ids"].dtype)
                named["expert_map"] = None
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
