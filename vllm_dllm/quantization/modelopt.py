"""Checkpoints of NVIDIA's ModelOpt.

On GPUs vLLM runs them itself. CPUs run compressed-tensors' formats, so there config and tensors are
converted to what compressed-tensors would have written for the same numbers.

Source: vLLM's `modelopt.py`; ModelOpt's `export/unified_export_hf.py` and `quant_utils.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.quantization.schemes import GROUP_SIZE, IN_CHECKPOINT, Scheme, list_linears

logger = init_logger(__name__)

METHODS = ("modelopt", "modelopt_fp4")
"""vLLM's names of the formats below."""
READ = "read_from_modelopt"
"""Key in a configuration of compressed-tensors that was converted here."""
SCHEMES = {
    "NVFP4": Scheme.NVFP4,
    "FP8": Scheme.FP8_DYNAMIC,
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme.FP8_DYNAMIC,
}
"""ModelOpt's formats that are served -> compressed-tensors' schemes."""


def adapt_modelopt_config(model_config: ModelConfig) -> None:
    """Checks the quantization config of a ModelOpt checkpoint. On CPUs also replaces it, in place,
    by one of compressed-tensors. Does nothing for other checkpoints.

    Raises:
        ValueError: the checkpoint's format is not served; names it.
    """
    hf_config = model_config.hf_config
    written = getattr(hf_config, "quantization_config", None)
    if not isinstance(written, Mapping) or not _is_modelopt_config(written):
        return
    # hf_quant_config.json has the same one level deeper than config.json, under other names.
    options = written.get("quantization", written)
    algorithm = _read_algorithm(options, model_config.model)
    if not current_platform.is_cpu():
        return
    if algorithm == "FP8":
        logger.info("On CPUs, inputs of FP8 layers are quantised token by token.")
    excluded = options.get("exclude_modules", options.get("ignore")) or []
    # All linears of the text model but those that are excluded. Nothing else can be quantised here.
    targets = [
        name
        for name in (IN_CHECKPOINT + linear for linear in list_linears(hf_config.get_text_config()))
        if not any(_excludes(pattern, name) for pattern in excluded)
    ]
    scheme = SCHEMES[algorithm].for_all_linears().model_dump(mode="json")
    hf_config.quantization_config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme["format"],
        "config_groups": {"group_0": scheme | {"targets": targets}},
        "ignore": [],
        READ: algorithm,
    }
    model_config.quantization = "compressed-tensors"


def _read_algorithm(options: Mapping[str, Any], model: str) -> str:
    """Returns the key of `SCHEMES` that a quantization config names. Raises ValueError if there is
    none, or its groups have another size. `model`: the checkpoint, for errors."""
    algorithm = str(options.get("quant_algo")).upper()
    if algorithm not in SCHEMES:
        raise ValueError(
            f"quant_algo of {model} is {options.get('quant_algo')!r}: of ModelOpt's formats, "
            f"{', '.join(SCHEMES)} are served. Use another checkpoint, or quantise the bf16 one "
            f"with `vllm-dllm quantize`."
        )
    group_size = int(options.get("group_size") or GROUP_SIZE)
    if algorithm == "NVFP4" and group_size != GROUP_SIZE:
        raise ValueError(
            f"group_size must be {GROUP_SIZE}, got {group_size} in the NVFP4 of {model}. Use "
            f"another checkpoint."
        )
    return algorithm


def _is_modelopt_config(written: Mapping[str, Any]) -> bool:
    """Whether `written`, a quantization config, comes from ModelOpt."""
    producer = written.get("producer")
    name = written.get("quant_method") or (isinstance(producer, Mapping) and producer.get("name"))
    return str(name).lower().startswith("modelopt")


def _excludes(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name`, a linear of the decoder, or the encoder's name of the same
    linear. A pattern without wildcards is a module's name, or its end, as ModelOpt wrote before
    0.39."""
    twin = name.replace("model.decoder.", "model.encoder.language_model.", 1)
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(twin, pattern)
    module = re.compile(rf"(.*\.)?{re.escape(pattern)}(\..*)?")
    return bool(module.fullmatch(name) or module.fullmatch(twin))


KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_FUSED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|down_proj)"
    rf"(?:[._](?P<kind>{'|'.join(KINDS)}))?"
)
_CACHE_SCALES = (".k_scale", ".v_scale", ".k_bias", ".v_bias")


def to_compressed_tensors_weights(
    weights: Iterable[tuple[str, torch.Tensor]], algorithm: str, num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a ModelOpt checkpoint's tensors under compressed-tensors' names, converted where the
    formats differ. Leaves out scales and biases of the KV cache, which CPUs do not quantise.
    `algorithm`: a key of `SCHEMES`."""
    each = (
        own
        for name, weight in weights
        if not name.endswith(_CACHE_SCALES)
        for own in _split_experts(name, weight, num_experts)
    )
    if algorithm == "NVFP4":
        return _nvfp4_to_compressed_tensors(each)
    return _fp8_to_compressed_tensors(each)


def _split_experts(
    name: str, weight: torch.Tensor, num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of each expert where all experts are one tensor: weights [E, N, ...],
    scales [E, ...] or one for all. Gate and up are the halves of N. Yields other tensors as they
    are."""
    found = _FUSED.fullmatch(name)
    if found is None:
        yield name, weight
        return
    parts = ("gate_proj", "up_proj") if found["part"] == "gate_up_proj" else ("down_proj",)
    by_expert = weight if weight.numel() > 1 else weight.reshape(1).expand(num_experts)
    for expert, of_expert in enumerate(by_expert):
        halves = [of_expert] * len(parts)
        if of_expert.numel() > 1:
            halves = list(of_expert.chunk(len(parts)))
        for part, half in zip(parts, halves, strict=True):
            yield f"{found['experts']}.{expert}.{part}.{found['kind'] or 'weight'}", half


def _nvfp4_to_compressed_tensors(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields NVFP4 tensors under compressed-tensors' names. Inverts global scales: in ModelOpt's
    files they multiply, in compressed-tensors' they divide."""
    for name, weight in weights:
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and weight.dtype == torch.uint8:
            yield f"{layer}.weight_packed", weight
        elif kind == "weight_scale_2":
            yield f"{layer}.weight_global_scale", weight.float().reciprocal().reshape(1)
        elif kind == "input_scale":
            yield f"{layer}.input_global_scale", weight.float().reciprocal().reshape(1)
        else:
            yield name, weight


def _fp8_to_compressed_tensors(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields FP8 tensors with a scale [N, 1] for the N channels, also where ModelOpt has one for
    all. Leaves out scales of inputs, which are quantised token by token."""
    num_channels: dict[str, int] = {}
    waiting: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        layer, _, kind = name.rpartition(".")
        if kind == "input_scale":
            continue
        if kind == "weight_scale":
            waiting[layer] = weight
        else:
            yield name, weight
        if kind == "weight" and weight.dtype == torch.float8_e4m3fn:
            num_channels[layer] = len(weight)
        if layer in num_channels and layer in waiting:
            scale = waiting.pop(layer).reshape(-1, 1)
            yield f"{layer}.weight_scale", scale.expand(num_channels[layer], 1).contiguous()
    for layer, scale in waiting.items():  # without a weight, which is then reported as missing
        yield f"{layer}.weight_scale", scale
