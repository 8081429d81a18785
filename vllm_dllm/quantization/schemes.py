"""Which schemes of compressed-tensors can be served, and the errors for the others."""

from enum import Enum
from typing import Any

from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType

GROUP_SIZE = 16
"""Of NVFP4."""
INT4_GROUP_SIZE = 32
"""What `vllm-dllm quantize` writes; small checkpoints have no rows of 128."""


class Scheme(Enum):
    FP8_DYNAMIC = "float-quantized"
    """e4m3 weights with a scale per channel, activations quantised token by token."""
    NVFP4 = "nvfp4-pack-quantized"
    """e2m1 weights and activations in groups of 16, with e4m3 scales and global ones."""
    INT8 = "int-quantized"
    """int8 weights with a scale per channel, activations quantised token by token."""
    W4A16 = "pack-quantized"
    """4-bit integer weights in groups of 32, activations as they are."""
    OTHER = None
    """Any other: vLLM may have a GPU kernel for it."""


def recognize(layer: str, scheme: dict[str, Any], on_cpu: bool) -> Scheme:
    """Recognizes the scheme of a layer in vLLM's dictionary.

    Raises:
        ValueError: it cannot be served, on a CPU or at all.
    """
    weights: QuantizationArgs = scheme["weights"]
    inputs: QuantizationArgs | None = scheme.get("input_activations")
    layout = scheme.get("format")
    if layout not in [known.value for known in CompressionFormat]:
        raise _refusal(layer, f"format must be one of compressed-tensors', got {layout!r}")
    if not weights.symmetric:
        raise _refusal(layer, f"weights must not have zero points, got {layer}.weight_zero_point")
    is_fp4 = weights.strategy == QuantizationStrategy.TENSOR_GROUP and weights.num_bits == 4
    if is_fp4 and weights.group_size != GROUP_SIZE:
        raise _refusal(layer, f"group_size must be {GROUP_SIZE}, got {weights.group_size}")
    if layout == Scheme.FP8_DYNAMIC.value and (
        _is_fp8(weights, QuantizationStrategy.CHANNEL, dynamic=False)
        and _is_fp8(inputs, QuantizationStrategy.TOKEN, dynamic=True)
    ):
        return Scheme.FP8_DYNAMIC
    if layout == Scheme.NVFP4.value and _is_nvfp4(weights) and _is_nvfp4(inputs):
        return Scheme.NVFP4
    if layout == Scheme.INT8.value and (
        _is_int(weights, 8, QuantizationStrategy.CHANNEL, dynamic=False)
        and _is_int(inputs, 8, QuantizationStrategy.TOKEN, dynamic=True)
    ):
        return Scheme.INT8
    if (
        layout == Scheme.W4A16.value
        and inputs is None
        and _is_int(weights, 4, QuantizationStrategy.GROUP, dynamic=False)
        and weights.group_size == INT4_GROUP_SIZE
        and weights.actorder is None
    ):
        return Scheme.W4A16
    if on_cpu:
        raise _refusal(layer, f"CPUs cannot run {describe(scheme)}")
    return Scheme.OTHER


def check_method(layer: str, method: str, has_zero_points: bool, on_cpu: bool) -> None:
    """Raises ValueError if vLLM's `method`, which is not compressed-tensors, cannot be served
    here."""
    if has_zero_points:
        raise _refusal(layer, f"weights must not have zero points, got {layer}.qzeros")
    if on_cpu:
        raise _refusal(layer, f"CPUs cannot run the method '{method}'")


def describe(scheme: dict[str, Any]) -> str:
    """Says a scheme of vLLM's dictionary in words."""
    parts = [
        f"{args.num_bits}-bit {args.type} {name}, a scale per {args.strategy}"
        for name, args in (
            ("weights", scheme["weights"]),
            ("inputs", scheme.get("input_activations")),
        )
        if args is not None
    ]
    return f"{scheme.get('format')} ({'; '.join(parts)})"


def _is_fp8(args: QuantizationArgs | None, strategy: QuantizationStrategy, dynamic: bool) -> bool:
    return args is not None and (
        args.type,
        args.num_bits,
        args.strategy,
        bool(args.dynamic),
        args.symmetric,
    ) == (QuantizationType.FLOAT, 8, strategy, dynamic, True)


def _is_int(
    args: QuantizationArgs | None, num_bits: int, strategy: QuantizationStrategy, dynamic: bool
) -> bool:
    return args is not None and (
        args.type,
        args.num_bits,
        args.strategy,
        bool(args.dynamic),
        args.symmetric,
    ) == (QuantizationType.INT, num_bits, strategy, dynamic, True)


def _is_nvfp4(args: QuantizationArgs | None) -> bool:
    return args is not None and (
        args.type,
        args.num_bits,
        args.strategy,
        args.group_size,
        args.symmetric,
    ) == (QuantizationType.FLOAT, 4, QuantizationStrategy.TENSOR_GROUP, GROUP_SIZE, True)


def _refusal(layer: str, complaint: str) -> ValueError:
    return ValueError(
        f"quantization_config of {layer}: {complaint}. FP8_DYNAMIC, NVFP4, int8 (W8A8) "
        f"and W4A16 in groups of {INT4_GROUP_SIZE} can be served: quantise the bf16 checkpoint "
        f"with `vllm-dllm quantize`, --scheme fp8-dynamic, nvfp4, int8 or w4a16."
    )
