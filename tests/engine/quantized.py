"""Quantised checkpoints, and transformers computing them.

All arithmetic of quantisation here is compressed-tensors': its scales, its roundings, its packing.
But vLLM scales int8 inputs so that the largest becomes 127, where compressed-tensors has 127.5.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import DiffusionGemmaForBlockDiffusion

from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import Engine, GetEngine

FORMATS = {
    "FP8_DYNAMIC": "float-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "W8A8": "int-quantized",
    "W4A16": "pack-quantized",
}
PUBLISHED = ("FP8_DYNAMIC", "NVFP4")
INT4_GROUP = 32
NOISES = 30
LEFT_OUT = ["lm_head", "re:.*router", "re:.*vision_tower", "re:.*embed", "re:.*self_conditioning"]
# Linears that vLLM runs as one, which share NVFP4's global scales, and the largest input that
# these make room for; another one for each, so that no two can be mixed up.
TOGETHER = {
    ("q_proj", "k_proj", "v_proj"): 24.0,
    ("o_proj",): 12.0,
    ("gate_proj", "up_proj"): 30.0,
    ("down_proj",): 50.0,
}


def quantize(source: Path, target: Path, scheme: str, ignore: Sequence[str] = ()) -> Path:
    """Writes the checkpoint `source` to `target` with all linears of its layers quantised but those
    of `ignore`: names, or patterns after `re:`."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    state_dict = split_experts(load_file(source / "model.safetensors"))
    compressed = {}
    for name, weight in state_dict.items():
        layer, _, kind = name.rpartition(".")
        parent, _, linear = layer.rpartition(".")
        group = next((g for g in TOGETHER if linear in g), None)
        is_ignored = any(
            re.match(i[3:], layer) if i.startswith("re:") else i == layer for i in ignore
        )
        if ".decoder.layers." not in name or group is None or is_ignored:
            compressed[name] = weight
            continue
        siblings = [f"{parent}.{sibling}.{kind}" for sibling in group]
        largest = max(state_dict[s].abs().max().float() for s in siblings if s in state_dict)
        for key, value in compress(weight, scheme, largest, TOGETHER[group]).items():
            compressed[f"{layer}.{key}"] = value
    save_file(compressed, target / "model.safetensors", metadata={"format": "pt"})
    describe(target, scheme, [*LEFT_OUT, *ignore])
    return target


def describe(path: Path, scheme: str, ignore: list[str]) -> None:
    """Completes config.json in `path`."""
    config = json.loads((path / "config.json").read_text())
    quantization = QuantizationConfig(
        config_groups={"group_0": preset(scheme)},
        format=FORMATS[scheme],
        quantization_status="compressed",
        ignore=ignore,
    )
    config["quantization_config"] = json.loads(quantization.model_dump_json())
    (path / "config.json").write_text(json.dumps(config, indent=2))


def preset(scheme: str) -> QuantizationScheme:
    found = preset_name_to_scheme(scheme, ["Linear"])
    if scheme == "W4A16":
        found.weights.group_size = INT4_GROUP
    return found


def add_kv_cache_scales(path: Path) -> None:
    """As of a checkpoint whose KV cache was calibrated for FP8."""
    weights = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    for layer in range(config["text_config"]["num_hidden_layers"]):
        for name, scale in (("k_scale", 3.0), ("v_scale", 0.2)):
            weights[f"model.decoder.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (path / "config.json").write_text(json.dumps(config, indent=2))


def split_experts(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one linear each, as llm-compressor saves them."""
    split = {}
    for name, weight in state_dict.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            split[name] = weight
            continue
        for expert, own in enumerate(weight):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for linear, part in zip(names, own.chunk(len(names)), strict=True):
                split[f"{layer}.{expert}.{linear}.weight"] = part.contiguous()
    return split


def compress(
    weight: torch.Tensor, scheme: str, largest: torch.Tensor, largest_input: float
) -> dict[str, torch.Tensor]:
    """The tensors of one linear."""
    quantization = preset(scheme)
    weight = weight.float()
    tensors, global_scale = {"weight": weight}, None
    if scheme in ("FP8_DYNAMIC", "W8A8"):
        blocks = weight[:, None]
    elif scheme == "W4A16":
        blocks = weight.unflatten(1, (-1, INT4_GROUP))
    else:
        blocks, global_scale = weight.unflatten(1, (-1, 16)), generate_gparam(-largest, largest)
        tensors["weight_global_scale"] = global_scale
        room = torch.tensor(largest_input)
        tensors["input_global_scale"] = generate_gparam(-room, room)
    tensors["weight_scale"], _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), quantization.weights, global_scale
    )
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])
    return {k: v.contiguous() for k, v in compressor.compress(tensors, quantization).items()}


def started(engine: GetEngine, path: Path, scheme: str, **options: Any) -> Engine | None:
    """An engine of the quantised checkpoint, or None where this processor must refuse it: it cannot
    add up products of int8."""
    from vllm_dllm.cpu.compat.ops import int8_sums_are_exact

    if scheme not in ("int8", "W8A8") or int8_sums_are_exact():
        return engine(path, **options)
    with pytest.raises(ValueError, match="need a processor with VNNI"):
        engine(path, **options)
    return None


def is_decided(
    first_step: Callable[[], torch.Tensor], expected: torch.Tensor, noises: int = NOISES
) -> bool:
    """Whether noise of the size of fp32's errors in the inputs leaves `expected` alone,
    log-probabilities that `first_step` gives."""
    for seed in range(noises):
        torch.manual_seed(seed)
        with noisy_inputs(tolerances.NOISE_OF_INPUTS):
            noisy = first_step()
        if (noisy - expected).abs().max() > tolerances.LOGPROB:
            return False
    return True


_noise = {"relative": 0.0}


@contextmanager
def noisy_inputs(relative: float) -> Iterator[None]:
    """Models of `load` get inputs that are off by about this much, before each is rounded."""
    _noise["relative"] = relative
    try:
        yield
    finally:
        _noise["relative"] = 0.0


@torch.no_grad()
def load(path: Path, original: Path) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model of the quantised checkpoint `path` in fp32: dequantised weights, and
    inputs rounded in front of every quantised linear. `original` is what it was made from."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = next(name for name, form in FORMATS.items() if form == config["format"])
    stored = load_file(path / "model.safetensors")
    model = reference.load(original)
    for stack in (model.model.decoder, model.model.encoder.language_model):
        compute_quantized(stack, stored, scheme, "model.decoder.")
    return model


@torch.no_grad()
def compute_quantized(
    model: nn.Module, stored: dict[str, torch.Tensor], scheme: str, prefix: str = ""
) -> None:
    """Lets the layers of `model` that are quantised in `stored`, whose names begin with `prefix`,
    compute as `load` says."""
    for name, module in model.named_modules():
        name = prefix + name
        if isinstance(module, nn.Linear) and f"{name}.weight_scale" in stored:
            weight, inputs = decompress(stored, name, scheme)
            module.weight.copy_(weight)
            module.register_forward_pre_hook(lambda _, args, q=inputs: q(args[0]))
        elif f"{name}.0.down_proj.weight_scale" in stored and hasattr(module, "act_fn"):
            module.forward = Experts(stored, name, scheme, module).forward


def decompress(stored: dict[str, torch.Tensor], name: str, scheme: str):
    """The weight of a linear, and how its input is rounded."""
    quantization = preset(scheme)
    tensors = {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")}
    if scheme == "NVFP4":  # compressed-tensors' decompress would round to bf16
        packed = tensors["weight_packed"]
        values = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    elif scheme == "W4A16":
        shape = torch.Size(tensors["weight_shape"].tolist())
        values = unpack_from_int32(tensors["weight_packed"], 4, shape).float()
    else:
        values = tensors["weight"].float()
    weight = dequantize(
        values, tensors["weight_scale"].float(), global_scale=tensors.get("weight_global_scale")
    )
    arguments, global_scale = quantization.input_activations, tensors.get("input_global_scale")

    def round_input(x: torch.Tensor) -> torch.Tensor:  # [B, T, K] or [T, K]
        if x.dim() == 2:
            return round_input(x[None])[0]
        x = x * (1 + _noise["relative"] * torch.randn_like(x))
        if arguments is None:
            return x
        if scheme == "W8A8":
            step = x.abs().amax(-1, keepdim=True) / 127
            return torch.where(step > 0, (x / step).round() * step, x)
        scale, zero_point = compute_dynamic_scales_and_zp(x, arguments, None, global_scale)
        return fake_quantize(x, scale, zero_point, arguments, global_scale=global_scale)

    return weight, round_input


class Experts:
    """transformers' experts of a layer, one after the other."""

    def __init__(self, stored, name: str, scheme: str, module: nn.Module) -> None:
        self.act_fn = module.act_fn
        self.linears = [
            {
                linear: decompress(stored, f"{name}.{expert}.{linear}", scheme)
                for linear in ("gate_proj", "up_proj", "down_proj")
            }
            for expert in range(module.num_experts)
        ]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for expert, linears in enumerate(self.linears):
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            if not len(token):
                continue

            def linear(x: torch.Tensor, name: str, linears=linears) -> torch.Tensor:
                weight, round_input = linears[name]
                return F.linear(round_input(x), weight)

            x = hidden_states[token]
            hidden = self.act_fn(linear(x, "gate_proj")) * linear(x, "up_proj")
            output.index_add_(
                0, token, linear(hidden, "down_proj") * top_k_weights[token, choice, None]
            )
        return output
