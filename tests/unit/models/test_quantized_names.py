"""Quantised checkpoints: names of the 26B ones, tensors that do not fit, memory, and which schemes
of a quantization_config are refused, left to vLLM, said to be slow."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file
from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader.utils import (
    process_weights_after_loading,
)

from bench.dummy_checkpoint import SHAPE_26B
from checkpoints.recipes.architecture import build_generation_config
from tests.engine import quantized
from tests.engine.masked import CONFIGS
from tests.unit.models.building import build, build_any
from tests.unit.models.test_weights import transformers_state_dict
from vllm_dllm import plugin
from vllm_dllm.cpu.compat import ops as cpu_ops
from vllm_dllm.cpu.quantization import layers
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as ServedModel
from vllm_dllm.quantization import config as quantization_config

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


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4", "W4A16"])
def test_whole_weights_are_loaded(
    checkpoints: dict[str, Path], models: Callable[[str], ServedModel], scheme: str
) -> None:
    """Of some parameters vLLM says another type than the tensors have."""
    models(scheme).load_weights(load_file(checkpoints[scheme] / "model.safetensors").items())


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


def set_group(config: dict[str, Any], **changes: Any) -> None:
    config["config_groups"]["group_0"]["weights"].update(changes)


FOREIGN: dict[str, tuple[str, Callable[[dict], None], str]] = {
    "unknown-format": (
        "FP8_DYNAMIC",
        lambda c: (
            c.update(format="float-squeezed") or c["config_groups"]["group_0"].update(format=None)
        ),
        r"layers\.0\.self_attn\.q_proj: format must be one of .*, got 'float-squeezed'",
    ),
    "group-size": (
        "NVFP4",
        lambda c: set_group(c, group_size=32),
        r"layers\.0\.self_attn\.q_proj: group_size must be 16, got 32",
    ),
    "zero-points": (
        "FP8_DYNAMIC",
        lambda c: (
            set_group(c, type="int", num_bits=4, symmetric=False)
            or c.update(format="pack-quantized")
            or c["config_groups"]["group_0"].update(input_activations=None, format=None)
        ),
        r"layers\.0\.self_attn\.q_proj: weights must not have zero points, got "
        r"model\.decoder\.layers\.0\.self_attn\.q_proj\.weight_zero_point\. FP8_DYNAMIC, NVFP4",
    ),
    "no-kernel-on-a-cpu": (
        "FP8_DYNAMIC",
        lambda c: set_group(c, strategy="tensor"),
        r"q_proj: CPUs cannot run float-quantized \(8-bit float weights, a scale per tensor; 8-bit "
        r"float inputs, a scale per token\)\. FP8_DYNAMIC, NVFP4, int8 \(W8A8\) and W4A16 in "
        r"groups of 32 can be served",
    ),
    "embeddings": (
        "FP8_DYNAMIC",
        lambda c: (
            c["config_groups"]["group_0"]["targets"].append("model.decoder.embed_tokens")
            or c.update(ignore=["lm_head"])
        ),
        r"quantises model\.decoder\.embed_tokens, but denoising reads the embeddings",
    ),
}


def edit_config(source: Path, target: Path, change: Callable[[dict], None]) -> None:
    """A copy of a checkpoint with another quantization_config."""
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((target / "config.json").read_text())
    change(config["quantization_config"])
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_schemes_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    scheme, change, message = FOREIGN[name]
    edit_config(checkpoints[scheme], tmp_path, change)
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "cpu")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the reading of a configuration logs; a new logger, as an old one says a thing once."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = init_logger(f"tests.{id(messages)}")
    logger.setLevel("INFO")
    logger.handlers = [handler]
    monkeypatch.setattr(quantization_config, "logger", logger)
    monkeypatch.setattr(layers, "logger", logger)
    return messages


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
EMULATED = {
    "FP8_DYNAMIC": "vLLM has no CPU kernel for experts in FP8_DYNAMIC: they run in an emulation",
    "NVFP4": "vLLM has no CPU kernel for NVFP4: these layers run in an emulation",
    "W4A16": "vLLM has no CPU kernel for experts in W4A16: they run in an emulation",
}


@pytest.mark.parametrize("scheme", EMULATED)
def test_an_emulation_is_logged_once(
    checkpoints: dict[str, Path], logged: list[str], scheme: str
) -> None:
    build(checkpoints[scheme], "meta")
    build(checkpoints[scheme], "meta")
    (message,) = logged
    assert message.startswith(EMULATED[scheme]) and message.endswith("It is exact but slow.")


def test_int8_is_not_emulated(
    checkpoints: dict[str, Path], logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_ops, "int8_sums_are_exact", lambda: True)
    build(checkpoints["W8A8"], "meta")
    assert not logged


def test_int8_without_vnni(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "int8_sums_are_exact", lambda: False)
    with pytest.raises(ValueError, match="need a processor with VNNI"):
        build(checkpoints["W8A8"], "meta")


@pytest.mark.parametrize(("scheme", "count"), [("FP8_DYNAMIC", 0), ("NVFP4", 1), ("W4A16", 0)])
def test_an_emulation_without_experts_is_logged(
    checkpoints: dict[str, Path], tmp_path: Path, logged: list[str], scheme: str, count: int
) -> None:
    """NVFP4 linears are emulated, too; FP8 ones have a kernel."""
    edit_config(checkpoints[scheme], tmp_path, lambda c: c["ignore"].append("re:.*experts.*"))
    build(tmp_path, "meta")
    assert len(logged) == count


def test_schemes_that_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    """On a GPU, with a warning that names them, except those with zero points."""
    on_gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(quantization_config, "current_platform", on_gpu)
    text_config = DiffusionGemmaTextConfig(**SHAPE_26B)
    preset = preset_name_to_scheme("FP8", ["Linear"])  # static scales, a tensor each
    described = QuantizationConfig(
        config_groups={"group_0": preset}, format="float-quantized", ignore=["lm_head"]
    )
    config = CompressedTensorsConfig.from_config(described.model_dump(mode="json"))
    assert quantization_config.adapt_quant_config(config, text_config) is not None
    other = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic")
    assert quantization_config.adapt_quant_config(other, text_config) is other
    first, second = logged
    assert re.search(
        r"by float-quantized \(8-bit float weights, a scale per tensor; 8-bit float inputs, a "
        r"scale per tensor\) is .* vLLM loads and computes model\.decoder\.layers\.0\.self_attn\."
        r"q_proj and others of this scheme: answers have not been compared",
        first,
    )
    assert second.startswith("Quantisation by fp8 is not one of")
    with pytest.raises(ValueError, match=r"zero points, got .*q_proj\.qzeros"):
        quantization_config.adapt_quant_config(AutoAWQConfig.from_config(AWQ), text_config)


def test_other_methods_are_refused_on_a_cpu() -> None:
    text_config = DiffusionGemmaTextConfig(**SHAPE_26B)
    method = Fp8Config(is_checkpoint_fp8_serialized=True)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.q_proj: CPUs cannot run the method 'fp8'"
    ):
        quantization_config.adapt_quant_config(method, text_config)


STATIC_FP8 = QuantizationConfig(
    config_groups={"group_0": preset_name_to_scheme("FP8", ["Linear"])}, format="float-quantized"
)
BY_TENSOR: dict[str, dict[str, Any]] = {
    "compressed-tensors": STATIC_FP8.model_dump(mode="json"),
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}


@pytest.mark.parametrize("method", BY_TENSOR)
def test_a_scale_per_tensor_in_a_masked_model(tmp_path: Path, method: str) -> None:
    """vLLM gives q, k and v one scale when it loads them, by an operation that CPUs lack."""
    plugin.register()
    architecture = "SDARForCausalLM"
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "quantization_config": BY_TENSOR[method],
        "mask_token_id": 500,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"CPUs cannot run .* can be served: quantise"):
        build_any(tmp_path, "meta", "bfloat16")


def test_kv_cache_scales(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """They are loaded; a CPU's cache keeps the model's type."""
    path = checkpoints["FP8_DYNAMIC"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    edit_config(path, tmp_path, lambda c: c.update(kv_cache_scheme=scheme))
    model, _ = build(tmp_path, "cpu")
    scales = {
        f"model.decoder.layers.{i}.self_attn.{kv}_scale": torch.tensor([2.0 + i])
        for i in range(4)
        for kv in "kv"
    }
    model.load_weights(iter((load_file(path / "model.safetensors") | scales).items()))
    attention = model.model.layers[3].self_attn.attn
    assert attention.v_scale == 5.0
    assert attention.kv_cache_dtype == "auto"
