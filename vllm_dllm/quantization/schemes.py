"""Which schemes of compressed-tensors can be served, errors for the others, and which layers have
one.

vLLM renames layers that a checkpoint's `quantization_config` writes in full, but matches patterns
(`re:...`) against its own names, and it looks for the value projection that full-attention layers
lack. So both are written in full here.
"""

import re
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from compressed_tensors import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    preset_name_to_scheme,
)
from transformers import PretrainedConfig

if TYPE_CHECKING:  # importing it takes seconds
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

GROUP_SIZE = 16
"""Values of a group in NVFP4."""
INT4_GROUP_SIZE = 32
"""Values of a group that `vllm-dllm quantize` writes for W4A16; small checkpoints have no rows of
128."""


class Scheme(Enum):
    """A way to quantise layers, by its `format` in compressed-tensors."""

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

    def for_all_linears(self) -> QuantizationScheme:
        """Returns compressed-tensors' preset of this scheme, with the format of its tensors. There
        is none of `OTHER`."""
        preset = preset_name_to_scheme("W8A8" if self is Scheme.INT8 else self.name, ["Linear"])
        if self is Scheme.W4A16:
            assert preset.weights is not None
            preset.weights.group_size = INT4_GROUP_SIZE
        preset.format = CompressionFormat(self.value)
        return preset


def recognize_scheme(layer: str, scheme: dict[str, Any], on_cpu: bool) -> Scheme:
    """Returns which Scheme a layer has. `OTHER`: none that is known here, but perhaps vLLM runs it
    on a GPU.

    `layer`: the layer's name, for errors. `scheme`: vLLM's dictionary of its scheme. `on_cpu`:
    whether it is to be served on a CPU.

    Raises:
        ValueError: the format is none of compressed-tensors', weights have zero points, groups of
            NVFP4 have another size than `GROUP_SIZE`, or it would be `OTHER` on a CPU, which has no
            kernel for it.
    """
    weights: QuantizationArgs = scheme["weights"]
    inputs: QuantizationArgs | None = scheme.get("input_activations")
    layout = scheme.get("format")
    if layout not in [known.value for known in CompressionFormat]:
        raise _unsupported(layer, f"format must be one of compressed-tensors', got {layout!r}")
    if not weights.symmetric:
        raise _unsupported(
            layer, f"weights must not have zero points, got {layer}.weight_zero_point"
        )
    is_fp4 = weights.strategy == QuantizationStrategy.TENSOR_GROUP and weights.num_bits == 4
    if is_fp4 and weights.group_size != GROUP_SIZE:
        raise _unsupported(layer, f"group_size must be {GROUP_SIZE}, got {weights.group_size}")
    has_plain_order = layout != Scheme.W4A16.value or weights.actorder is None
    is_symmetric = inputs is None or inputs.symmetric
    found = (_Format.of(weights), _Format.of(inputs))
    for kind, formats in _FORMATS.items():
        if has_plain_order and is_symmetric and layout == kind.value and found == formats:
            return kind
    if on_cpu:
        raise _unsupported(layer, f"CPUs cannot run {describe_scheme(scheme)}")
    return Scheme.OTHER


def check_other_method(layer: str, method: str, *, has_zero_points: bool, on_cpu: bool) -> None:
    """Raises ValueError for a quantization method that is not compressed-tensors', if its weights
    have zero points, or on a CPU. `layer`: a layer's name, for the error."""
    if has_zero_points:
        raise _unsupported(layer, f"weights must not have zero points, got {layer}.qzeros")
    if on_cpu:
        raise _unsupported(layer, f"CPUs cannot run the method '{method}'")


def describe_scheme(scheme: dict[str, Any]) -> str:
    """Returns a scheme in words. `scheme`: vLLM's dictionary of it."""
    parts = [
        f"{args.num_bits}-bit {args.type} {name}, a scale per {args.strategy}"
        for name, args in (
            ("weights", scheme["weights"]),
            ("inputs", scheme.get("input_activations")),
        )
        if args is not None
    ]
    return f"{scheme.get('format')} ({'; '.join(parts)})"


class _Format(NamedTuple):
    """How weights or inputs are quantised, as far as kernels depend on it."""

    type: str
    num_bits: int
    strategy: str  # what has a scale of its own
    group_size: int | None  # values of a group; None: they are not grouped
    is_dynamic: bool  # whether scales are computed from each input

    @classmethod
    def of(cls, args: QuantizationArgs | None) -> "_Format | None":
        """Returns the format that `args` describe. NVFP4 counts as not dynamic, since it may be
        either. Returns None if `args` is None: not quantised."""
        if args is None:
            return None
        in_nvfp4 = args.strategy == QuantizationStrategy.TENSOR_GROUP
        is_grouped = in_nvfp4 or args.strategy == QuantizationStrategy.GROUP
        return cls(
            type=args.type,
            num_bits=args.num_bits,
            strategy=args.strategy,
            group_size=args.group_size if is_grouped else None,
            is_dynamic=bool(args.dynamic) and not in_nvfp4,
        )


_FORMATS = {
    kind: (_Format.of(preset.weights), _Format.of(preset.input_activations))
    for kind in Scheme
    if kind is not Scheme.OTHER and (preset := kind.for_all_linears())
}
"""Formats of weights and inputs that are served."""


def _unsupported(layer: str, complaint: str) -> ValueError:
    """Returns the error that a layer's scheme cannot be served. `complaint`: the reason."""
    return ValueError(
        f"quantization_config of {layer}: {complaint}. FP8_DYNAMIC, NVFP4, int8 (W8A8) "
        f"and W4A16 in groups of {INT4_GROUP_SIZE} can be served: quantise the bf16 checkpoint "
        f"with `vllm-dllm quantize`, --scheme fp8-dynamic, nvfp4, int8 or w4a16."
    )


IN_VLLM, IN_CHECKPOINT = "model.", "model.decoder."


def list_linears(text_config: PretrainedConfig) -> Iterator[str]:
    """Yields the names of the text model's linears that may be quantised, such as
    `layers.0.mlp.up_proj`. Each expert's linears are named. Full-attention layers have no
    `v_proj`."""
    for i, layer_type in enumerate(text_config.layer_types):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if name != "v_proj" or layer_type != "full_attention":
                yield f"layers.{i}.self_attn.{name}"
        for block in ("mlp", *(f"experts.{e}" for e in range(text_config.num_experts or 0))):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"layers.{i}.{block}.{name}"


def add_vllm_names(config: "CompressedTensorsConfig", text_config: PretrainedConfig) -> None:
    """Adds vLLM's names of layers to `ignore` and the targets of `config`, in place, where they
    have the checkpoint's names or patterns."""
    names = list(list_linears(text_config))
    values = [
        f"layers.{i}.self_attn."
        for i, layer_type in enumerate(text_config.layer_types)
        if layer_type == "full_attention"
    ]
    config.ignore = [*config.ignore, *_unmatched_names(config.ignore, names, values)]
    schemes: dict[str, Any] = config.target_scheme_map
    for target in list(schemes):
        for name in _unmatched_names([target], names, values):
            schemes.setdefault(name, schemes[target])


def _unmatched_names(patterns: list[str], names: list[str], values: list[str]) -> Iterator[str]:
    """Yields vLLM's names of layers that `patterns` mean but do not match. `names`: linears as in
    `list_linears`. `values`: attention layers whose values are projected by `k_proj`, as
    prefixes."""
    compiled = [re.compile(p.removeprefix("re:")) for p in patterns if p.startswith("re:")]
    in_full = set(patterns)

    def matches(name: str) -> bool:
        return name in in_full or any(p.match(name) for p in compiled)

    for name in names:
        if not matches(IN_VLLM + name) and matches(IN_CHECKPOINT + name):
            yield IN_VLLM + name
    for layer in values:
        key, value = f"{layer}k_proj", f"{layer}v_proj"
        if not matches(IN_VLLM + value) and (
            matches(IN_VLLM + key) or matches(IN_CHECKPOINT + key)
        ):
            yield IN_VLLM + value
