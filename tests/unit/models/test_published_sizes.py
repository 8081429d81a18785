"""SDAR and LLaDA2 at published sizes: every name and shape of the weight map, plain and FP8.

TraDo has the sizes of SDAR, and LLaDA2.1 and 2.2 those of 2.0.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import quantized
from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import FP8, build_any, to_fp8
from vllm_dllm import plugin

ROUTER = r".*\.mlp\.gate$"
QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
LLADA2 = {
    "num_key_value_heads": 4,
    "vocab_size": 157184,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "SDAR-1.7B": (
        "SDARForCausalLM",
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
    ),
    "SDAR-4B": (
        "SDARForCausalLM",
        {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    ),
    "SDAR-8B": (
        "SDARForCausalLM",
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    ),
    "SDAR-30B-A3B": (
        "SDARMoeForCausalLM",
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "LLaDA2.0-mini": (
        "LLaDA2MoeModelLM",
        {
            **LLADA2,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "moe_intermediate_size": 512,
        },
    ),
    "LLaDA2.0-flash": (
        "LLaDA2MoeModelLM",
        {
            **LLADA2,
            "hidden_size": 4096,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "moe_intermediate_size": 1024,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_every_name_and_shape(tmp_path: Path, size: str, is_fp8: bool) -> None:
    plugin.register()
    architecture, sizes = SIZES[size]
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "head_dim": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        plain = published_weights(build(architecture, config), architecture)
    weights = {name: weight.bfloat16() for name, weight in plain.items()}
    if is_fp8:
        weights = to_fp8(weights, ROUTER)
        quantized.describe(tmp_path, "FP8_DYNAMIC", ["lm_head", f"re:{ROUTER}"])
    model, served = build_any(tmp_path, "meta", "bfloat16")
    # What config.json leaves out.
    is_llada = architecture == "LLaDA2MoeModelLM"
    assert served.diffusion_config.canvas_length == (32 if is_llada else 4)
    assert served.model_config.hf_config.mask_token_id == (156895 if is_llada else 151669)
    loaded = model.load_weights(iter(weights.items()))
    # Scales of an FP8 cache are not in these files.
    parameters = {n: p for n, p in model.named_parameters() if ".attn." not in n}
    assert loaded == set(parameters)
    # Each tensor has its place: none is left over where several become one.
    assert sum(p.numel() for p in parameters.values()) == sum(w.numel() for w in weights.values())
    in_fp8 = [p.numel() for p in parameters.values() if p.dtype == FP8]
    assert sum(in_fp8) == sum(w.numel() for w in weights.values() if w.dtype == FP8)
    assert bool(in_fp8) == is_fp8
