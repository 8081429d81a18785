"""Decides which tensors of a checkpoint are quantised, and describes that in a table.

The linears of the text layers are quantised, those of experts too. Masked models' checkpoints have
a tensor for each linear of an expert. transformers' DiffusionGemma has two for all experts of a
layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I]. A quantised checkpoint has three linears per
expert, as llm-compressor writes them and vLLM reads them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors import __version__ as compressed_tensors_version
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from transformers import DiffusionGemmaConfig

from vllm_dllm.errors import InputError
from vllm_dllm.quantization.schemes import GROUP_SIZE, INT4_GROUP_SIZE, Scheme
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize.source import Source
from vllm_dllm.tools.terminal import format_size

_GROUP_SIZES = {"nvfp4": GROUP_SIZE, "w4a16": INT4_GROUP_SIZE}

_LAYER = r"(?:model\.decoder|model|encoder)\.layers\.(\d+)\."
_TOGETHER = (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"))
_NAMES = "|".join((*_TOGETHER[0], *_TOGETHER[1], "query_key_value", "dense"))
_DENSE = re.compile(rf"({_LAYER}.*\.)({_NAMES})\.weight")
_EXPERTS = re.compile(_LAYER + r"experts\.(gate_up_proj|down_proj)")

# What is left as it is, in the order of look-up. The recipe of
# RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic leaves the same tensors.
KEPT = (
    (
        r"model\.encoder\.(vision_tower|embed_vision)\..*",
        "vision tower: only text layers are quantised",
    ),
    (
        r".*\.(embed_tokens|word_embeddings)\.weight|(lm|diffusion)_head\.weight",
        "embeddings, LM head",
    ),
    (r"model\.decoder\.self_conditioning\..*", "self-conditioning: feeds its errors back"),
    (_LAYER + r"(router|mlp\.gate)\..*", "router: an error picks other experts"),
    (r".*(norm|norm_[12])\.weight|.*\.layer_scalar", "norms and scalars"),
    (r".*\.bias", "biases"),
)


@dataclass(frozen=True)
class Linear:
    """A linear of the quantised checkpoint, and the place that its weight comes from."""

    module: str  # the linear's name, such as model.decoder.layers.0.experts.3.up_proj
    expert: int | None  # index into the source tensor's first axis; None: the tensor is a matrix
    rows: slice  # of the source matrix
    shape: tuple[int, int]  # [out, in]
    weight_group: str
    """Names the linears that vLLM fuses into one matrix, which share a global weight scale."""
    input_group: str
    """Names the linears that share a global input scale, such as all experts of a layer: most of
    vLLM's kernels take the largest input of all experts, whatever the checkpoint says."""


@dataclass(frozen=True)
class Plan:
    """Says what becomes of each tensor of a checkpoint."""

    scheme: str  # as on the command line, such as fp8-dynamic
    quantized: dict[str, tuple[Linear, ...]]
    """Tensor name -> the linears that it becomes."""
    kept: dict[str, str]
    """Tensor name -> the reason why it is left as it is."""
    ignore: list[str]
    """Linear modules that are left as they are, by transformers' names."""


def make_plan(scheme: str, source: Source) -> Plan:
    """Returns a plan of all tensors. Raises InputError if one is unknown, missing or malformed."""
    if scheme == "nvfp4" and source.is_masked:
        raise InputError(
            "nvfp4 is only for DiffusionGemma, because it measures inputs while the model "
            "denoises. A masked model takes --scheme fp8-dynamic, int8 or w4a16"
        )
    quantized: dict[str, tuple[Linear, ...]] = {}
    kept: dict[str, str] = {}
    for name, info in source.tensors.items():
        if linears := _linears(name, info):
            if info.dtype not in ("BF16", "F16", "F32"):
                raise InputError(f"{name}: expected BF16, F16 or F32 weights, got {info.dtype}")
            width, group = linears[0].shape[1], _GROUP_SIZES.get(scheme, 1)
            if width % group:
                raise InputError(
                    f"{name}: {scheme} needs an input width that is a multiple of {group}, got "
                    f"{width}; use --scheme fp8-dynamic or int8"
                )
            quantized[name] = linears
        else:
            kept[name] = _reason_to_keep(name)
    if source.is_masked:
        expected = _expected_of_masked(quantized, source.config["num_hidden_layers"])
    else:
        config = DiffusionGemmaConfig.from_dict(source.config)
        expected = _expected_of_diffusion_gemma(config.text_config.layer_types)
    for name in expected:
        if name not in quantized:
            raise InputError(
                f"the checkpoint has no tensor {name}: expected all layers of config.json; copy or "
                f"save the checkpoint again"
            )
    return Plan(scheme, quantized, kept, _ignored_modules(kept, source))


def _linears(name: str, info: TensorInfo) -> tuple[Linear, ...]:
    """Returns the linears that a tensor becomes; () for a tensor that is not quantised."""
    if _DENSE.fullmatch(name):
        module = name.removesuffix(".weight")
        fused = re.sub(r"\.[qkv]_proj$", ".qkv_proj", module)
        fused = re.sub(r"mlp\.(gate|up)_proj$", "mlp.gate_up_proj", fused)
        out, width = _expect_axes(name, info, 2)
        return (Linear(module, None, slice(out), (out, width), fused, fused),)
    if match := _EXPERTS.fullmatch(name):
        num_experts, out, width = _expect_axes(name, info, 3)
        prefix = name.removesuffix(f".{match[2]}")
        if match[2] == "down_proj":
            parts = [("down_proj", slice(out))]
        else:  # gate first, see DiffusionGemmaTextExperts.forward
            parts = [("gate_proj", slice(out // 2)), ("up_proj", slice(out // 2, out))]
        return tuple(
            Linear(
                module=f"{prefix}.{expert}.{part}",
                expert=expert,
                rows=rows,
                shape=(out // len(parts), width),
                weight_group=f"{name}.{expert}",
                input_group=name,
            )
            for expert in range(num_experts)
            for part, rows in parts
        )
    return ()


def _expect_axes(name: str, info: TensorInfo, count: int) -> tuple[int, ...]:
    """Returns the shape of a tensor. Raises InputError unless it has `count` axes."""
    if len(info.shape) != count:
        raise InputError(f"{name}: expected {count} axes, got the shape {list(info.shape)}")
    return info.shape


def _reason_to_keep(name: str) -> str:
    """Returns why a tensor is left as it is. Raises InputError for an unknown tensor."""
    for pattern, reason in KEPT:
        if re.fullmatch(pattern, name):
            return reason
    raise InputError(
        f"{name} is not a tensor of a model that is served: expected a checkpoint as it is "
        f"published, or as transformers' save_pretrained writes it"
    )


def _expected_of_diffusion_gemma(layer_types: Sequence[str]) -> Iterator[str]:
    """Yields the names of all tensors to quantise in a complete DiffusionGemma checkpoint."""
    for i, layer_type in enumerate(layer_types):
        prefix = f"model.decoder.layers.{i}"
        # Full-attention layers have no values of their own: the keys serve as values.
        for projection in "qko" if layer_type == "full_attention" else "qkvo":
            yield f"{prefix}.self_attn.{projection}_proj.weight"
        for projection in ("gate", "up", "down"):
            yield f"{prefix}.mlp.{projection}_proj.weight"
        for projection in ("gate_up", "down"):
            yield f"{prefix}.experts.{projection}_proj"


def _expected_of_masked(quantized: Collection[str], num_layers: int) -> Iterator[str]:
    """Yields tensors that a masked model's checkpoint with the `quantized` ones must have: every
    projection of a group that has one, and at least one projection in each layer."""
    first = min(quantized, default="model.layers.0.self_attn.q_proj.weight")
    missing = set(range(num_layers))
    for match in filter(None, map(_DENSE.fullmatch, quantized)):
        missing.discard(int(match[2]))
        for together in _TOGETHER:
            if match[3] in together:
                yield from (f"{match[1]}{part}.weight" for part in together)
    yield from (re.sub(r"layers\.\d+", f"layers.{layer}", first) for layer in missing)


def _ignored_modules(kept: Mapping[str, str], source: Source) -> list[str]:
    """Returns the names of the linear modules that stay as they are, for config.json."""
    modules = {"lm_head", "diffusion_head"} if source.is_masked else {"lm_head"}
    for name, reason in kept.items():
        module = name.removesuffix(".weight")
        is_matrix = name != module and len(source.tensors[name].shape) == 2
        if is_matrix and not reason.startswith("embeddings"):
            modules.add(module)
            # transformers has each text layer twice, and saves the weights they share once.
            modules.add(module.replace("decoder.layers", "encoder.language_model.layers"))
    return sorted(modules)


def quantization_scheme(scheme: str) -> QuantizationScheme:
    """Returns compressed-tensors' preset of a scheme for all linears."""
    return Scheme[scheme.upper().replace("-", "_")].for_all_linears()


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Returns config.json's quantization_config as compressed-tensors' ModelCompressor does."""
    preset = quantization_scheme(plan.scheme)
    config = QuantizationConfig(
        config_groups={"group_0": preset},
        format=preset.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=plan.ignore,
    )
    return {"version": compressed_tensors_version, **config.model_dump(mode="json")}


def quantized_bytes(linear: Linear, scheme: str) -> int:
    """Returns the size in bytes of a linear's tensors in the quantised checkpoint."""
    out, width = linear.shape
    if scheme in ("fp8-dynamic", "int8"):
        return out * width + 4 * out  # weight, fp32 scale for each row
    if scheme == "w4a16":
        return out * width // 2 + 2 * out * (width // INT4_GROUP_SIZE) + 16  # bf16 scales, shape
    return out * width // 2 + out * width // GROUP_SIZE + 4 + 4  # and the two global scales


def describe(plan: Plan, tensors: Mapping[str, TensorInfo]) -> str:
    """Returns a table of what is quantised, what is left and why, with sizes before and after."""
    lines = [f"{'quantised to ' + plan.scheme:52} {'linears':>8} {'before':>10} {'after':>10}"]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in plan.quantized:
        kinds[re.sub(r"layers\.\d+", "layers.*", name)].append(name)
    before = after = 0
    for kind, names in sorted(kinds.items()):
        linears = [linear for name in names for linear in plan.quantized[name]]
        old = _count_bytes(names, tensors)
        new = sum(quantized_bytes(linear, plan.scheme) for linear in linears)
        before, after = before + old, after + new
        numbers = (int(name.partition("layers.")[2].partition(".")[0]) for name in names)
        label = kind.removesuffix(".weight").replace("*", _format_ranges(numbers))
        lines.append(f"  {label:50} {len(linears):8} {format_size(old)} {format_size(new)}")
    lines.append(f"  {'total':59} {_format_change(before, after)}")
    lines += ["", f"{'left as it is':52} {'tensors':>8} {'size':>10}"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.kept.items():
        reasons[reason].append(name)
    for reason, names in sorted(reasons.items()):
        size = _count_bytes(names, tensors)
        lines.append(f"  {reason:50} {len(names):8} {format_size(size)}")
    rest = _count_bytes(plan.kept, tensors)
    lines += ["", f"{'checkpoint':61} {_format_change(before + rest, after + rest)}"]
    return "\n".join(lines)


def _count_bytes(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> int:
    """Returns the size of the named tensors together."""
    return sum(tensors[name].num_bytes for name in names)


def _format_change(before: int, after: int) -> str:
    return f"{format_size(before)} {format_size(after)} {after / before:7.3f}x"


def _format_ranges(numbers: Iterable[int]) -> str:
    """Returns numbers such as 0, 1, 3 as "{0-1,3}"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs) + "}"
