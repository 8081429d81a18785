"""Nemotron-Labs-Diffusion at its published sizes: rotations, and weights of other shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import (
    Ministral3RotaryEmbedding,
    get_llama_4_attn_scale,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from tests.unit.models.building import build_any
from tests.unit.models.test_published_sizes import SIZES, checkpoint_tensors, published
from vllm_dllm import plugin

NEMOTRON = [size for size in SIZES if "Nemotron" in size]


@pytest.fixture(autouse=True)
def own_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM shares those of equal settings, also where one model is on the meta device."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def native(config: dict[str, Any]) -> Ministral3Config:
    """transformers' own, of the same layers."""
    left_out = ("model_type", "architectures", "auto_map", "attn_implementation", "mlp_bias")
    return Ministral3Config(**{key: config[key] for key in config if key not in left_out})


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
    config = published("Nemotron-3B") | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = build_any(tmp_path, "meta", "bfloat16")
    weights = checkpoint_tensors(config) | {name: torch.empty(shape, device="meta")}
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        model.load_weights(iter(weights.items()))


@pytest.mark.parametrize("size", NEMOTRON)
def test_rotations_and_the_growth_of_queries(tmp_path: Path, size: str) -> None:
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
