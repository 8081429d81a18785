"""Nemotron-Labs-Diffusion at its published sizes: rotations, and weights of other shapes. The
experts of LLaDA2.2's blocks, of requests that lie in one step, beside the reference's."""

import json
from pathlib import Path
from types import SimpleNamespace
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

from tests import tolerances
from tests.engine.llada2 import Gate
from tests.unit.models.building import build_any
from tests.unit.models.test_published_sizes import SIZES, checkpoint_tensors, published
from vllm_dllm import plugin
from vllm_dllm.models.masked import BlockRouting

NEMOTRON = [size for size in SIZES if "Nemotron" in size]


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


BLOCK, EXPERTS, HIDDEN = 4, 16, 8
CONFIG = SimpleNamespace(
    block_size=BLOCK,
    expert_capacity=5,
    num_experts=EXPERTS,
    num_experts_per_tok=3,
    hidden_size=HIDDEN,
    routed_scaling_factor=2.5,
)


@pytest.mark.parametrize("stale", [0, 9])
def test_each_block_chooses_together(stale: int) -> None:
    """Whole blocks; one that the context cuts, before another request's first; what a CUDA graph
    has behind the rows, which holds an earlier step's positions."""
    generator = torch.Generator().manual_seed(0)
    gate = Gate(CONFIG)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(gate.weight.shape, generator=generator))
        gate.expert_bias.copy_(torch.randn(EXPERTS, generator=generator))
    requests = [range(8), range(4, 14), range(4), range(8, 12)]
    positions = [position for each in requests for position in each]
    rows = torch.randn(len(positions) + 3, HIDDEN, generator=generator)
    routing = BlockRouting(CONFIG, len(rows) + 5)
    routing.number_blocks(torch.tensor(positions + [stale] * 3))
    found = torch.zeros(len(rows), EXPERTS)
    with torch.no_grad():
        weights, experts = routing.choose_experts(
            rows, rows @ gate.weight.T, 3, True, bias=gate.expert_bias
        )
        found.scatter_(1, experts, weights)
        first = 0
        for each in requests:
            own = slice(first, first + len(each))
            expected = gate(rows[own])
            near = tolerances.softmax(EXPERTS, 3.0)
            tolerances.assert_within(found[own], expected, near)
            assert torch.equal(found[own] > 0, expected > 0)
            first += len(each)
    chosen = [set(experts[i : i + BLOCK].flatten().tolist()) for i in (0, 4, 8, 12)]
    assert max(map(len, chosen)) <= CONFIG.expert_capacity
