"""vLLM's methods for FP8 and NVFP4 experts, with its parameters, computed on a CPU."""

from abc import abstractmethod
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts, SharedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)

from vllm_dllm.quantization import experts as experts  # registers the operations
from vllm_dllm.quantization.nvfp4_format import GROUP_SIZE


class _OnCpu(CompressedTensorsMoEMethod):
    """Experts that compute by themselves: there is no vLLM kernel to choose or to prepare weights
    for."""

    @property
    def is_monolithic(self) -> bool:
        return False  # the router runs first

    @property
    def supports_eplb(self) -> bool:
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        # Numbers of this rank's experts; -1 for those of others.
        own_ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        return self.run(layer, x, topk_weights, own_ids, layer.activation.value)

    @abstractmethod
    def run(self, layer: RoutedExperts, *inputs: Any) -> torch.Tensor:
        """`inputs` are the first arguments of the operations in `experts.py`."""


class CompressedTensorsFp8MoEMethodOnCpu(_OnCpu, CompressedTensorsW8A8Fp8MoEMethod):
    """One scale per channel for weights, one per row for activations."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Weights stay as stored."""

    def run(self, layer: RoutedExperts, *inputs: Any) -> torch.Tensor:
        return torch.ops.vllm.vllm_dllm_fp8_experts(
            *inputs,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
        )


class CompressedTensorsNvfp4MoEMethodOnCpu(_OnCpu, CompressedTensorsW4A4Nvfp4MoEMethod):
    """All experts of a layer share the global scales of their inputs, as on GPUs: those that fit
    the largest activation of any expert."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        # Not vLLM's own __init__, which looks for a kernel, finds none on CPUs and fails.
        CompressedTensorsMoEMethod.__init__(self, moe)
        self.group_size = GROUP_SIZE
        self.use_a16 = self.use_global_sf = False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Weights stay as stored. From here on, their global scales multiply instead of divide."""
        for name, scale in (
            ("w13_weight_scale_2", 1 / layer.w13_weight_global_scale[:, 0]),
            ("w2_weight_scale_2", 1 / layer.w2_weight_global_scale),
            ("w13_input_scale", layer.w13_input_global_scale.min()),
            ("w2_input_scale", layer.w2_input_global_scale.min()),
        ):
            layer.register_parameter(name, Parameter(scale, requires_grad=False))

    def run(self, layer: RoutedExperts, *inputs: Any) -> torch.Tensor:
        return torch.ops.vllm.vllm_dllm_nvfp4_experts(
            *inputs,
            layer.w13_weight_packed,
            layer.w13_weight_scale,
            layer.w13_weight_scale_2,
            layer.w2_weight_packed,
            layer.w2_weight_scale,
            layer.w2_weight_scale_2,
            layer.w13_input_scale,
            layer.w2_input_scale,
        )
