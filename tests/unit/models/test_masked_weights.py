"""Masked models' checkpoints: no tensor may be missing where vLLM joins several."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import build_any
from vllm_dllm import plugin

JOINED = {  # one of each kind that the checkpoints hold
    "SDARForCausalLM": (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    ),
    "SDARMoeForCausalLM": (
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.mlp.experts.5.gate_proj.weight",
        "model.layers.0.mlp.experts.7.down_proj.weight",
    ),
    "LLaDA2MoeModelLM": (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
    ),
    "NemotronLabsDiffusionModel": (
        "encoder.layers.1.self_attn.v_proj.weight",
        "encoder.layers.0.mlp.up_proj.weight",
    ),
    "Fast_dLLM_QwenForCausalLM": (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.2.mlp.gate_proj.weight",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", JOINED)
def test_a_missing_part_is_named(tmp_path: Path, architecture: str) -> None:
    plugin.register()
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "vocab_size": 512,
        "mask_token_id": 500,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    served, _ = build_any(tmp_path, "meta", "float32")
    with torch.device("meta"):
        weights = published_weights(build(architecture, config), architecture)
    served.load_weights(iter(weights.items()))
    for name in JOINED[architecture]:
        left = {key: weight for key, weight in weights.items() if key != name}
        assert len(left) == len(weights) - 1
        with pytest.raises(ValueError, match=f"no weights for {name}. Check that its files are"):
            served.load_weights(iter(left.items()))
