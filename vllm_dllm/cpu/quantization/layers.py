"""Methods that run experts of compressed-tensors checkpoints on a CPU: vLLM's methods, which make
and load the parameters, but computed by our operation."""

from fractions import Fraction
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from torch.nn import Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    RoutedExperts,
    SharedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_fp8,
    compressed_tensors_moe_w8a8_int8,
    compressed_tensors_moe_wna16,
)

from vllm_dllm.cpu.compat.ops import Int8Weights, check_int8_support
from vllm_dllm.cpu.quantization import linear as linear  # registers the kernels for linears
from vllm_dllm.quantization.config import LINEAR
from vllm_dllm.quantization.schemes import GROUP_SIZE, Scheme, recognize_scheme

logger = init_logger(__name__)


def choose_layer_method(
    config: CompressedTensorsConfig, layer: torch.nn.Module, prefix: str
) -> QuantizeMethodBase | None:
    """Returns the method that loads and computes `layer` on this CPU, which vLLM calls `prefix`.
    None leaves it to vLLM, as for linears, whose kernels are registered.

    Raises:
        ValueError: this CPU cannot compute the layer.
    """
    if isinstance(layer, LinearBase):
        scheme = config.get_scheme_dict(layer, prefix)
        _check_inputs(scheme)
        if scheme is not None and _scales_by_tensor(scheme["weights"]):
            recognize_scheme(prefix, scheme, on_cpu=True)  # which raises
    if not isinstance(layer, RoutedExperts):
        return None
    first = f"{prefix}.0.{layer.ckpt_gate_proj_name}"
    scheme = config.get_scheme_dict(LINEAR, first)
    if scheme is None:
        return UnquantizedFusedMoEMethod(layer.moe_config)
    weights, inputs = scheme["weights"], scheme["input_activations"]
    _check_inputs(scheme)
    kind = recognize_scheme(first, scheme, on_cpu=True)
    log_emulation(kind, has_experts=True)
    match kind:
        case Scheme.NVFP4:
            return Nvfp4ExpertsOnCpu(layer.moe_config)
        case Scheme.INT8:
            return Int8ExpertsOnCpu(weights, inputs, layer.moe_config)
        case Scheme.W4A16:
            return Int4ExpertsOnCpu(weights, layer.moe_config)
    return Fp8ExpertsOnCpu(weights, inputs, layer.moe_config)


def log_emulation(kind: Scheme, has_experts: bool) -> None:
    """Logs once that layers of the scheme `kind` have no CPU kernel and are emulated. Does nothing
    for schemes that have one. `has_experts`: whether experts are among the layers."""
    if kind is Scheme.NVFP4 or (kind is not Scheme.INT8 and has_experts):
        logger.info_once(
            "vLLM has no CPU kernel for %s: %s run in an emulation of the GPU's "
            "arithmetic that unpacks the weights at every use. It is exact but slow.",
            kind.name if kind is Scheme.NVFP4 else f"experts in {kind.name}",
            "these layers" if kind is Scheme.NVFP4 else "they",
        )


def _check_inputs(scheme: dict[str, Any] | None) -> None:
    """Raises ValueError for int8 inputs that this CPU cannot multiply. None: not quantised."""
    inputs: QuantizationArgs | None = scheme and scheme.get("input_activations")
    if inputs is not None and inputs.type == QuantizationType.INT:
        check_int8_support()


def _scales_by_tensor(weights: QuantizationArgs) -> bool:
    """Whether FP8 weights have one scale each. vLLM gives the parts of a joined layer one scale
    when it loads them, by an operation that its build for CPUs lacks."""
    is_float = weights.type == QuantizationType.FLOAT
    return is_float and weights.strategy == QuantizationStrategy.TENSOR


class _ExpertsOnCpu(CompressedTensorsMoEMethod):
    """Experts that compute by our operation, without a vLLM kernel. Subclasses do not call the
    `__init__` of vLLM's class where it looks for a kernel, finds none and fails."""

    number_format: str
    """Key of `experts.PROJECTIONS`."""
    tensors: tuple[str, ...]
    """What the function in `PROJECTIONS` takes: tensors of the layer, without "w13_" or "w2_"."""

    @property
    def is_monolithic(self) -> bool:
        return False  # the router runs first

    @property
    def supports_eplb(self) -> bool:
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Does nothing: the weights are used as they are stored."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,  # [T, H]
        topk_weights: torch.Tensor,  # [T, k]
        topk_ids: torch.Tensor,  # [T, k]
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the experts' output, [T, H]. Shared experts are computed elsewhere."""
        # Indices of this rank's experts; -1 for experts of other ranks.
        own_ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        return torch.ops.vllm.vllm_dllm_experts(
            x,
            topk_weights,
            own_ids,
            layer.activation.value,
            self.number_format,
            [getattr(layer, f"w13_{name}") for name in self.tensors],
            [getattr(layer, f"w2_{name}") for name in self.tensors],
        )


class Fp8ExpertsOnCpu(
    _ExpertsOnCpu, compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod
):
    """FP8 experts: one scale per channel for weights, one per row for activations."""

    number_format = "fp8"
    tensors = ("weight", "weight_scale")


class Nvfp4ExpertsOnCpu(
    _ExpertsOnCpu, compressed_tensors_moe_w4a4_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod
):
    """NVFP4 experts. All experts of a layer share the global scales of their inputs, as on GPUs:
    the largest activation of any expert fits."""

    number_format = "nvfp4"
    tensors = ("weight_packed", "weight_scale", "weight_scale_2", "input_scale")

    def __init__(self, moe: FusedMoEConfig) -> None:
        CompressedTensorsMoEMethod.__init__(self, moe)
        self.group_size = GROUP_SIZE
        self.use_a16 = self.use_global_sf = False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Adds the global scales that are used from here on to `layer`: of weights, inverted, since
        the checkpoint's divide; of inputs, one for all experts."""
        for name, scale in (
            ("w13_weight_scale_2", 1 / layer.w13_weight_global_scale[:, 0]),
            ("w2_weight_scale_2", 1 / layer.w2_weight_global_scale),
            ("w13_input_scale", layer.w13_input_global_scale.min()),
            ("w2_input_scale", layer.w2_input_global_scale.min()),
        ):
            layer.register_parameter(name, Parameter(scale, requires_grad=False))


class Int8ExpertsOnCpu(
    _ExpertsOnCpu, compressed_tensors_moe_w8a8_int8.CompressedTensorsW8A8Int8MoEMethod
):
    """int8 experts, multiplied by oneDNN: a scale per channel of weights, and per row."""

    number_format = "int8"
    tensors = ("handles", "weight")

    def __init__(
        self, weights: QuantizationArgs, inputs: QuantizationArgs, moe: FusedMoEConfig
    ) -> None:
        CompressedTensorsMoEMethod.__init__(self, moe)
        self.weight_quant, self.input_quant = weights, inputs
        self.static_input_scales = False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Has oneDNN copy the weights of `layer`, adds the handles of the copies to it, and frees
        the weights that were loaded: their last dimension becomes 0."""
        layer.int8_weights = []  # keeps the handles valid
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            layer.int8_weights.append(packed := Int8Weights(weight, scale, self.moe.in_dtype))
            layer.register_buffer(f"{name}_handles", packed.handles, persistent=False)
            weight.data = weight.new_empty(*weight.shape[:2], 0)


class Int4ExpertsOnCpu(_ExpertsOnCpu, compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod):
    """Experts with 4-bit weights and a scale per group; activations are not quantised."""

    number_format = "int4"
    tensors = ("weight_packed", "weight_scale")

    def __init__(self, weights: QuantizationArgs, moe: FusedMoEConfig) -> None:
        CompressedTensorsMoEMethod.__init__(self, moe)
        self.weight_quant, self.input_quant = weights, None
        self.symmetric, self.num_bits = True, weights.num_bits
        self.packed_factor = Fraction(32, weights.num_bits)
        self.strategy, self.group_size = weights.strategy, weights.group_size
