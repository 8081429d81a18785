"""A checkpoint's quantization_config: which schemes are refused, left to vLLM, said to be slow."""

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
from transformers import DiffusionGemmaTextConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from bench.dummy_checkpoint import SHAPE_26B
from tests.engine.masked import CONFIGS
from tests.unit.models.building import build, build_any
from vllm_dllm import plugin
from vllm_dllm.cpu.compat import ops as cpu_ops
from vllm_dllm.cpu.quantization import layers
from vllm_dllm.quantization import config as quantization_config


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
        r"q_proj and others of this scheme: missing tensors are not detected",
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


FP8 = QuantizationConfig(
    config_groups={"group_0": preset_name_to_scheme("FP8", ["Linear"])}, format="float-quantized"
)
BY_TENSOR: dict[str, dict[str, Any]] = {
    "compressed-tensors": FP8.model_dump(mode="json"),
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
