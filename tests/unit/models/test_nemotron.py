"""Nemotron-Labs-Diffusion at its published sizes: the weight map, plain and FP8, and rotations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Ministral3Config, Ministral3ForCausalLM
from transformers.models.ministral3.modeling_ministral3 import (
    Ministral3RotaryEmbedding,
    get_llama_4_attn_scale,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from tests.engine import quantized
from tests.engine.masked import CONFIGS
from tests.unit.models.building import FP8, build_any, to_fp8
from vllm_dllm import plugin

YARN = CONFIGS["NemotronLabsDiffusionModel"]["rope_parameters"] | {
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
}
SIZES: dict[str, dict[str, Any]] = {
    "3B": {"hidden_size": 3072, "num_hidden_layers": 26, "intermediate_size": 9216},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 34, "intermediate_size": 14336},
    "14B": {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "intermediate_size": 16384,
        "rope_parameters": YARN | {"rope_theta": 1e9},
    },
    "3B-Base": {
        "hidden_size": 3072,
        "num_hidden_layers": 26,
        "intermediate_size": 9216,
        "max_position_embeddings": 4096,
        "rope_parameters": YARN | {"factor": 0.25},
    },
}


@pytest.fixture(autouse=True)
def own_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM shares those of equal settings, also where one model is on the meta device."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def published(size: str) -> dict[str, Any]:
    """The config.json of that size."""
    return {
        **CONFIGS["NemotronLabsDiffusionModel"],
        "architectures": ["NemotronLabsDiffusionModel"],
        "vocab_size": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": YARN,
        "block_size": 32,
        "mask_token_id": 100,
        "bos_token_id": 1,
        "eos_token_id": 2 if size == "3B-Base" else 11,
        **SIZES[size],
    }


def native(config: dict[str, Any]) -> Ministral3Config:
    """transformers' own, of the same layers."""
    left_out = ("model_type", "architectures", "auto_map", "attn_implementation", "mlp_bias")
    return Ministral3Config(**{key: config[key] for key in config if key not in left_out})


def checkpoint_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All names of the published files, on the meta device."""
    with torch.device("meta"):
        state_dict = Ministral3ForCausalLM(native(config)).state_dict()
    names = {"model": "encoder", "lm_head": "diffusion_head"}
    parts = {name: name.partition(".") for name in state_dict}
    return {f"{names[parts[n][0]]}.{parts[n][2]}": w.bfloat16() for n, w in state_dict.items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_every_name_and_shape(tmp_path: Path, size: str, is_fp8: bool) -> None:
    plugin.register()
    config = published(size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = checkpoint_tensors(config)
    assert len(weights) == 9 * config["num_hidden_layers"] + 3
    if is_fp8:
        weights = to_fp8(weights, "diffusion_head")
        quantized.describe(tmp_path, "FP8_DYNAMIC", ["diffusion_head"])
    model, _ = build_any(tmp_path, "meta", "bfloat16")
    loaded = model.load_weights(iter(weights.items()))
    # Scales of an FP8 cache are not in these files.
    parameters = {n: p for n, p in model.named_parameters() if ".attn." not in n}
    assert loaded == set(parameters)
    # Each tensor has its place: none is left over where several become one.
    assert sum(p.numel() for p in parameters.values()) == sum(w.numel() for w in weights.values())
    in_fp8 = [name for name, parameter in parameters.items() if parameter.dtype == FP8]
    assert len(in_fp8) == (4 * config["num_hidden_layers"] if is_fp8 else 0)
    assert parameters["lm_head.weight"].shape == (131072, config["hidden_size"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.layers.1.self_attn.k_proj.weight", (1024, 3000)),
        ("encoder.layers.1.mlp.up_proj.weight", (9000, 3072)),
        ("diffusion_head.weight", (131072, 3000)),
    ],
)
def test_misshapen_weights_are_refused(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    plugin.register()
    config = published("3B") | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = build_any(tmp_path, "meta", "bfloat16")
    weights = checkpoint_tensors(config) | {name: torch.empty(shape, device="meta")}
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        model.load_weights(iter(weights.items()))


@pytest.mark.parametrize("size", SIZES)
def test_rotations_and_the_growth_of_queries(tmp_path: Path, size: str) -> None:
    """As in transformers, up to the end of the context."""
    plugin.register()
    config = published(size) | {"num_hidden_layers": 1, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"unread": torch.zeros(1)}, tmp_path / "model.safetensors")
    rope, longest = config["rope_parameters"], config["max_position_embeddings"]
    model, served = build_any(tmp_path, "cpu", "float32")
    attention = model.model.layers[0].self_attn
    positions = torch.tensor([0, 1, 100, 4095, 16383, 16384, 40000, 262143])
    positions = positions[positions < longest]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(positions), 128, generator=generator)
    with set_current_vllm_config(served):
        found, _ = attention.rotary_emb(positions, query.clone(), query.clone())
    cos, sin = Ministral3RotaryEmbedding(native(config))(query[None], positions[None])
    turned = torch.cat((-query[:, 64:], query[:, :64]), dim=-1)
    expected = query * cos[0] + turned * sin[0]
    # Angles of up to 262143 have that many units of rounding in fp32.
    bound = 2 * torch.finfo(torch.float32).eps * longest
    assert (found - expected).abs().max() <= bound * query.abs().max()
    beta, original = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    scale = get_llama_4_attn_scale(positions[None], beta, original)[0, 0]
    assert torch.equal(attention._get_llama_4_attn_scale(positions), scale)
