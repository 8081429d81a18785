"""Masked models at published sizes: every name and shape of the weight map, plain and FP8.

TraDo has the sizes of SDAR, and LLaDA2.1 and 2.2 those of 2.0.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine import quantized
from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import FP8, build_any, to_fp8
from vllm_dllm import plugin
from vllm_dllm.tools.plan.capacity import read_shape

SDAR = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
SDAR_MOE = {**SDAR, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
LLADA2 = dict(head_dim=128, num_key_value_heads=4, vocab_size=157184, num_experts=256) | dict(
    num_experts_per_tok=8, n_group=8, topk_group=4
)
YARN = CONFIGS["NemotronLabsDiffusionModel"]["rope_parameters"] | {
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
}
NEMOTRON = (
    dict(vocab_size=131072, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    | dict(rms_norm_eps=1e-5, max_position_embeddings=262144, rope_parameters=YARN)
    | dict(block_size=32, mask_token_id=100, bos_token_id=1, eos_token_id=11)
)
BASE = {"max_position_embeddings": 4096, "rope_parameters": YARN | {"factor": 0.25}}
FAST_DLLM = dict(max_position_embeddings=32768, bd_size=32) | dict(
    bos_token_id=151643, eos_token_id=151645
)
SMALL = {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
LARGE = {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}


class Family(NamedTuple):
    architecture: str
    block_length: int  # this and the mask are often left out of config.json
    mask_id: int
    unquantised: tuple[str, ...] = ()  # patterns of modules, beside the LM head


ROUTER = r".*\.mlp\.gate$"
FAMILIES = {
    "SDAR": Family("SDARForCausalLM", 4, 151669),
    "MoE": Family("SDARMoeForCausalLM", 4, 151669, (ROUTER,)),
    "LLaDA2": Family("LLaDA2MoeModelLM", 32, 156895, (ROUTER,)),
    "Nemotron": Family("NemotronLabsDiffusionModel", 32, 100, ("diffusion_head",)),
    "Fast-dLLM": Family("Fast_dLLM_QwenForCausalLM", 32, 151665),
}
# Family, widths of layers and of their MLPs, number of layers, and what else is in config.json.
SIZES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "SDAR-1.7B": ("SDAR", 2048, 6144, 28, SDAR | {"num_attention_heads": 16}),
    "SDAR-4B": ("SDAR", 2560, 9728, 36, SDAR),
    "SDAR-8B": ("SDAR", 4096, 12288, 36, SDAR),
    "SDAR-30B-A3B": ("MoE", 2048, 6144, 48, SDAR_MOE | {"moe_intermediate_size": 768}),
    "LLaDA2.0-mini": (
        *("LLaDA2", 2048, 5120, 20),
        LLADA2 | {"num_attention_heads": 16, "moe_intermediate_size": 512},
    ),
    "LLaDA2.0-flash": (
        *("LLaDA2", 4096, 9216, 32),
        LLADA2 | {"num_attention_heads": 32, "moe_intermediate_size": 1024},
    ),
    "Nemotron-3B": ("Nemotron", 3072, 9216, 26, NEMOTRON),
    "Nemotron-8B": ("Nemotron", 4096, 14336, 34, NEMOTRON),
    "Nemotron-14B": (
        *("Nemotron", 5120, 16384, 40),
        NEMOTRON | {"rope_parameters": YARN | {"rope_theta": 1e9}},
    ),
    "Nemotron-3B-Base": ("Nemotron", 3072, 9216, 26, NEMOTRON | BASE | {"eos_token_id": 2}),
    "Fast-dLLM-1.5B": (
        *("Fast-dLLM", 1536, 8960, 28),
        FAST_DLLM | SMALL | {"tie_word_embeddings": True},
    ),
    "Fast-dLLM-7B": (
        *("Fast-dLLM", 3584, 18944, 28),
        FAST_DLLM | LARGE | {"tie_word_embeddings": False},
    ),
}


def published(size: str) -> dict[str, Any]:
    """The config.json of that size."""
    family, hidden_size, intermediate_size, num_hidden_layers, others = SIZES[size]
    architecture = FAMILIES[family].architecture
    named = dict(architectures=[architecture], eos_token_id=1, pad_token_id=0)
    widths = dict(hidden_size=hidden_size, intermediate_size=intermediate_size)
    layers = dict(num_hidden_layers=num_hidden_layers)
    return CONFIGS[architecture] | named | widths | layers | others


def checkpoint_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All names of the published files, on the meta device."""
    (architecture,) = config["architectures"]
    with torch.device("meta"):
        plain = published_weights(build(architecture, config), architecture)
    left_out = "lm_head.weight" if config["tie_word_embeddings"] else None
    return {name: weight.bfloat16() for name, weight in plain.items() if name != left_out}


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", SIZES)
def test_every_name_and_shape(tmp_path: Path, size: str, is_fp8: bool) -> None:
    plugin.register()
    family, config = FAMILIES[SIZES[size][0]], published(size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = checkpoint_tensors(config)
    if is_fp8:
        weights = to_fp8(weights, *family.unquantised)
        ignored = [f"re:{pattern}" for pattern in family.unquantised]
        quantized.describe(tmp_path, "FP8_DYNAMIC", ["lm_head", *ignored])
    model, served = build_any(tmp_path, "meta", "bfloat16")
    assert served.diffusion_config.canvas_length == family.block_length
    assert served.model_config.hf_config.mask_token_id == family.mask_id
    loaded = model.load_weights(iter(weights.items()))
    # Scales of an FP8 cache are not in these files.
    parameters = {n: p for n, p in model.named_parameters() if ".attn." not in n}
    assert loaded == set(parameters)
    # Each tensor has its place: none is left over where several become one.
    assert sum(p.numel() for p in parameters.values()) == sum(w.numel() for w in weights.values())
    in_fp8 = [p.numel() for p in parameters.values() if p.dtype == FP8]
    assert sum(in_fp8) == sum(w.numel() for w in weights.values() if w.dtype == FP8)
    assert bool(in_fp8) == is_fp8


def test_memory_of_fast_dllm_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published("Fast-dLLM-7B")))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    shape = read_shape(tmp_path)
    assert (shape.canvas_length, len(shape.layers), shape.layers[0].head_size) == (32, 28, 128)
