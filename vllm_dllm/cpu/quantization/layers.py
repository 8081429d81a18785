"""Which method runs a layer of a compressed-tensors checkpoint on a CPU."""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from vllm_dllm.cpu.compat.ops import check_int8
from vllm_dllm.cpu.quantization import linear as linear  # registers the kernels for linears
from vllm_dllm.cpu.quantization.methods import (
    CompressedTensorsFp8MoEMethodOnCpu,
    CompressedTensorsInt4MoEMethodOnCpu,
    CompressedTensorsInt8MoEMethodOnCpu,
    CompressedTensorsNvfp4MoEMethodOnCpu,
)
from vllm_dllm.quantization.config import LINEAR
from vllm_dllm.quantization.schemes import Scheme, recognize

logger = init_logger(__name__)


def experts_method(
    config: CompressedTensorsConfig, layer: torch.nn.Module, prefix: str
) -> QuantizeMethodBase | None:
    """Returns None where vLLM chooses: for linears, among kernels that this process now has.

    Raises:
        ValueError: this CPU cannot compute the layer.
    """
    if isinstance(layer, LinearBase):
        _check_inputs(config.get_scheme_dict(layer, prefix))
    if not isinstance(layer, RoutedExperts):
        return None
    first = f"{prefix}.0.{layer.ckpt_gate_proj_name}"
    scheme = config.get_scheme_dict(LINEAR, first)
    if scheme is None:
        return UnquantizedFusedMoEMethod(layer.moe_config)
    weights, inputs = scheme["weights"], scheme["input_activations"]
    _check_inputs(scheme)
    kind = recognize(first, scheme, on_cpu=True)
    log_emulation(kind, has_experts=True)
    match kind:
        case Scheme.NVFP4:
            return CompressedTensorsNvfp4MoEMethodOnCpu(layer.moe_config)
        case Scheme.INT8:
            return CompressedTensorsInt8MoEMethodOnCpu(weights, inputs, layer.moe_config)
        case Scheme.W4A16:
            return CompressedTensorsInt4MoEMethodOnCpu(weights, layer.moe_config)
    return CompressedTensorsFp8MoEMethodOnCpu(weights, inputs, layer.moe_config)


def log_emulation(kind: Scheme, has_experts: bool) -> None:
    if kind is Scheme.NVFP4 or (kind is not Scheme.INT8 and has_experts):
        logger.info_once(
            "vLLM has no CPU kernel for %s: %s run in an emulation of the GPU's "
            "arithmetic that unpacks the weights at every use. It is exact but slow.",
            kind.name if kind is Scheme.NVFP4 else f"experts in {kind.name}",
            "these layers" if kind is Scheme.NVFP4 else "they",
        )


def _check_inputs(scheme: dict[str, Any] | None) -> None:
    """Raises ValueError for int8 inputs on a CPU that cannot multiply them."""
    inputs: QuantizationArgs | None = scheme and scheme.get("input_activations")
    if inputs is not None and inputs.type == QuantizationType.INT:
        check_int8()
