"""Fast-dLLM v2 at its published sizes: every name and shape of the weight map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import quantized
from tests.engine.masked import CONFIGS, build
from tests.unit.models.building import FP8, build_any, to_fp8
from vllm_dllm import plugin
from vllm_dllm.tools.plan.capacity import read_shape

ARCHITECTURE = "Fast_dLLM_QwenForCausalLM"
SIZES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def published(size: str) -> dict[str, Any]:
    """The config.json of that size."""
    return {
        **CONFIGS[ARCHITECTURE],
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 28,
        "max_position_embeddings": 32768,
        "bd_size": 32,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **SIZES[size],
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_every_name_and_shape(tmp_path: Path, size: str, is_fp8: bool) -> None:
    plugin.register()
    config = published(size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        state = build(ARCHITECTURE, config).state_dict()
    is_tied = config["tie_word_embeddings"]
    weights = {
        name: w.bfloat16() for name, w in state.items() if not (is_tied and "lm_head" in name)
    }
    assert len(weights) == 12 * 28 + 3 - is_tied
    if is_fp8:
        weights = to_fp8(weights)
        quantized.describe(tmp_path, "FP8_DYNAMIC", ["lm_head"])
    model, served = build_any(tmp_path, "meta", "bfloat16")
    assert served.diffusion_config.canvas_length == 32
    assert served.model_config.hf_config.mask_token_id == 151665
    loaded = model.load_weights(iter(weights.items()))
    # Scales of an FP8 cache are not in these files.
    parameters = {n: p for n, p in model.named_parameters() if ".attn." not in n}
    assert loaded == set(parameters)
    # Each tensor has its place: none is left over where several become one.
    assert sum(p.numel() for p in parameters.values()) == sum(w.numel() for w in weights.values())
    assert sum(p.dtype == FP8 for p in parameters.values()) == (4 * 28 if is_fp8 else 0)


def test_its_memory_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published("7B")))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    shape = read_shape(tmp_path)
    assert (shape.canvas_length, len(shape.layers), shape.layers[0].head_size) == (32, 28, 128)
