"""Tensors of quantised checkpoints: names of the 26B ones, those that do not fit, memory."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.utils import (
    process_weights_after_loading,
)

from bench.dummy_checkpoint import SHAPE_26B
from checkpoints.recipes.architecture import build_generation_config
from tests.engine import quantized
from tests.unit.models.building import build
from tests.unit.models.test_weights import transformers_state_dict
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as ServedModel

LINEAR = re.compile(r"model\.decoder\.layers\.\d+\.(?!router).*\.[a-z]+_proj$")
# What model cards of RedHatAI's checkpoints leave out, beside the layers that are never quantised.
ALSO_LEFT_OUT = {"FP8_DYNAMIC": "(?!)", "NVFP4": ".*self_attn"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", quantized.PUBLISHED)
def test_every_name_of_the_published_checkpoints(tmp_path: Path, scheme: str) -> None:
    """Experts are one linear each, `ignore` lists transformers' modules in full, scales of FP8 are
    bf16."""
    text_config = DiffusionGemmaTextConfig(**SHAPE_26B)
    config = DiffusionGemmaConfig(text_config=text_config, vision_config=Gemma4VisionConfig())
    with torch.device("meta"):
        plain = quantized.split_experts(transformers_state_dict(config))
    left_out = re.compile(ALSO_LEFT_OUT[scheme])
    state_dict, ignored = {}, []
    for name, weight in plain.items():
        layer = name.removesuffix(".weight")
        is_tied = name.startswith("model.encoder.language_model.")
        if is_tied and "router" in name:
            ignored += [layer] if weight.dim() == 2 else []
        elif name.endswith("layer_scalar"):
            state_dict[name] = torch.ones(1)  # the two modes' are compared, which takes values
        elif is_tied:
            continue
        elif not LINEAR.match(layer) or left_out.match(layer):
            state_dict[name] = weight
            ignored += [layer] if weight.dim() == 2 else []
        else:
            for kind, (shape, dtype) in stored(scheme, *weight.shape).items():
                state_dict[f"{layer}.{kind}"] = torch.empty(shape, dtype=dtype, device="meta")
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    config.save_pretrained(tmp_path)
    build_generation_config(256).save_pretrained(tmp_path)
    quantized.describe(tmp_path, scheme, [name for name in ignored if "embed_tokens" not in name])

    model, _ = build(tmp_path, "meta", dtype="bfloat16")
    loaded = model.load_weights(iter(state_dict.items()))
    quantised = {n for n, p in model.named_parameters() if p.dtype in (torch.uint8, FP8)}
    assert quantised <= loaded
    layers = {name.rpartition(".")[0] for name in quantised}
    assert len(layers) == text_config.num_hidden_layers * (3 if scheme == "NVFP4" else 5)
    experts = model.get_submodule("model.layers.0.experts.routed_experts")
    weight = experts.w13_weight if scheme == "FP8_DYNAMIC" else experts.w13_weight_packed
    assert weight.shape == (128, 2 * 704, 2816 // (1 if scheme == "FP8_DYNAMIC" else 2))


FP8 = torch.float8_e4m3fn


def stored(scheme: str, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the format says of a linear with weights [n, k]."""
    if scheme == "FP8_DYNAMIC":
        return {"weight": ((n, k), FP8), "weight_scale": ((n, 1), torch.bfloat16)}
    return {
        "weight_packed": ((n, k // 2), torch.uint8),
        "weight_scale": ((n, k // 16), FP8),
        "weight_global_scale": ((1,), torch.float32),
        "input_global_scale": ((1,), torch.float32),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "most"), [("FP8_DYNAMIC", 0.55), ("NVFP4", 0.35)])
def test_memory_of_the_served_weights(
    checkpoints: dict[str, Path], scheme: str, most: float
) -> None:
    path = checkpoints[scheme]
    model, config = build(path, "cpu", dtype="bfloat16")
    model.load_weights(iter(load_file(path / "model.safetensors").items()))
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    held = plain = 0
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase | RoutedExperts) or name.endswith("router.proj"):
            continue
        held += sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        if isinstance(module, LinearBase):
            plain += 2 * module.input_size * module.output_size
        else:
            moe = module.moe_config
            plain += 2 * 3 * moe.num_experts * moe.hidden_dim * moe.intermediate_size
    assert held <= most * plain


Weights = dict[str, torch.Tensor]
MLP, EXPERT = "model.decoder.layers.1.mlp", "model.decoder.layers.2.experts.3"


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {k: w for k, w in weights.items() if k != name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda weights: weights | {name: change(weights[name])}


def added(name: str, tensor: torch.Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: tensor}


def one_byte(scales: torch.Tensor, byte: int) -> torch.Tensor:
    """With another e4m3 number in the middle."""
    changed = scales.clone()
    changed.view(torch.uint8)[len(scales) // 2, 1] = byte
    return changed


# name: (scheme, what is done to the weights, what the error says)
DAMAGE: dict[str, tuple[str, Callable[[Weights], Weights], str]] = {
    "scale-of-one-of-three": (
        "FP8_DYNAMIC",
        without("model.decoder.layers.0.self_attn.k_proj.weight_scale"),
        r"no weights for model\.decoder\.layers\.0\.self_attn\.k_proj\.weight_scale\.",
    ),
    "scale-of-an-expert": (
        "NVFP4",
        without(f"{EXPERT}.up_proj.weight_global_scale"),
        rf"no weights for {re.escape(EXPERT)}\.up_proj\.weight_global_scale",
    ),
    "groups-of-32": (
        "NVFP4",
        changed(f"{MLP}.gate_proj.weight_scale", lambda w: w[:, ::2].contiguous()),
        r"at .*gate_proj\.weight_scale.*: its shape must be \[128, 8\], got \[128, 4\]",
    ),
    "expert-cut-short": (
        "FP8_DYNAMIC",
        changed(f"{EXPERT}.gate_proj.weight", lambda w: w[:, :96].contiguous()),
        r"at .*3\.gate_proj\.weight .*: its shape must be \[64, 128\], got \[64, 96\]",
    ),
    "unquantised-weight": (
        "FP8_DYNAMIC",
        changed(f"{MLP}.up_proj.weight", lambda w: w.bfloat16()),
        r"at .*up_proj\.weight .*: its type must be float8_e4m3fn, got bfloat16",
    ),
    "quantised-router": (
        "FP8_DYNAMIC",
        changed("model.decoder.layers.0.router.proj.weight", lambda w: w.to(FP8)),
        r"at .*router\.proj\.weight.*: its type must be .*, got float8_e4m3fn",
    ),
    "zero-points": (
        "NVFP4",
        added(f"{MLP}.up_proj.weight_zero_point", torch.zeros(1, dtype=torch.int32)),
        r"at .*up_proj\.weight_zero_point.*the layer has no weight_zero_point, only \[",
    ),
    "scale-is-nan": (
        "FP8_DYNAMIC",
        changed(f"{MLP}.up_proj.weight_scale", lambda w: w * torch.nan),
        rf"at {re.escape(MLP)}\.up_proj\.weight_scale of .*positive finite numbers, got nan",
    ),
    "scale-is-zero": (
        "NVFP4",
        changed(f"{EXPERT}.down_proj.input_global_scale", torch.zeros_like),
        rf"at {re.escape(EXPERT)}\.down_proj\.input_global_scale of .* finite numbers, got 0\.0",
    ),
    "scale-of-a-group-is-nan": (
        "NVFP4",
        changed(f"{EXPERT}.gate_proj.weight_scale", lambda w: one_byte(w, 0x7F)),
        rf"at {re.escape(EXPERT)}\.gate_proj\.weight_scale of .*positive finite numbers, got nan",
    ),
    "scale-of-a-group-is-negative": (
        "NVFP4",
        changed(f"{MLP}.down_proj.weight_scale", lambda w: one_byte(w, 0x80 + 0x38)),
        rf"at {re.escape(MLP)}\.down_proj\.weight_scale of .*positive finite numbers, got -1\.0",
    ),
    "scale-of-the-kv-cache-is-nan": (
        "FP8_DYNAMIC",
        added("model.decoder.layers.1.self_attn.k_scale", torch.tensor([torch.nan])),
        r"at model\.decoder\.layers\.1\.self_attn\.k_scale of .*positive finite numbers, got nan",
    ),
    "global-scales-of-gate-and-up-differ": (
        "NVFP4",
        changed(f"{EXPERT}.up_proj.weight_global_scale", lambda w: 2 * w),
        rf"at {re.escape(EXPERT)}\.(up|gate)_proj\.weight_global_scale of .*must be that of "
        rf"{re.escape(EXPERT)}\.(gate|up)_proj\.weight_global_scale, .* runs the two linears",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_are_named(
    checkpoints: dict[str, Path], models: Callable[[str], ServedModel], name: str
) -> None:
    scheme, damage, message = DAMAGE[name]
    weights = damage(load_file(checkpoints[scheme] / "model.safetensors"))
    with pytest.raises(ValueError, match=message):
        models(scheme).load_weights(iter(weights.items()))


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> Callable[[str], ServedModel]:
    """A model to load into; not processed, so it can be loaded again and again."""
    built: dict[str, ServedModel] = {}

    def get(scheme: str) -> ServedModel:
        if scheme not in built:
            built[scheme], _ = build(checkpoints[scheme], "cpu")
        return built[scheme]

    return get
