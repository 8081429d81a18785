"""Masked models' checkpoints: no tensor may be missing, and a wrong one is named. Nemotron-Labs-
Diffusion at its published sizes; the experts of LLaDA2.2's blocks beside the reference's."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import (
    Ministral3RotaryEmbedding,
    get_llama_4_attn_scale,
)
from vllm.config import set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests import tolerances
from tests.engine.llada2 import Gate
from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import build_any
from tests.unit.models.test_published_sizes import SIZES, published
from vllm_dllm import plugin
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.models.masked import BlockRouting
from vllm_dllm.quantization.checked_weights import weights_in_parts

ARCHITECTURES = sorted(FAMILIES)
_IS_TRIED = re.compile(r"(?!.*layers\.2|.*experts\.(?!5\.))").match
"""Of like tensors a few."""


def make(folder: Path, architecture: str, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model as it is served, without weights, and weights on `device` by their published
    names."""
    plugin.register()
    config = write_config(folder, architecture)
    served, _ = build_any(folder, "meta", "float32")
    with torch.device(device):
        return served, published_weights(build(architecture, config), architecture)


def write_config(folder: Path, architecture: str, **changes: Any) -> dict[str, Any]:
    config = CONFIGS[architecture] | {
        "architectures": [architecture],
        "vocab_size": 512,
        "mask_token_id": 500,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_or_smaller_tensor_is_named(tmp_path: Path, architecture: str) -> None:
    served, weights = make(tmp_path, architecture, "meta")
    served.load_weights(iter(weights.items()))
    for name in filter(_IS_TRIED, weights):
        left = {key: weight for key, weight in weights.items() if key != name}
        assert len(left) == len(weights) - 1
        with pytest.raises(
            ValueError, match=re.escape(f"no weights for {name}. Check that its files")
        ):
            served.load_weights(iter(left.items()))
        if len(weights[name]) > 1:
            smaller = weights | {name: weights[name][:-1]}
            with pytest.raises(ValueError, match=rf"at {re.escape(name)} .*: its shape must be "):
                served.load_weights(iter(smaller.items()))
    with weights_in_parts():
        for part in weights.items():
            served.load_weights(iter([part]))


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nan": (lambda w: torch.full_like(w, math.nan), "its numbers must be finite, got "),
    "shape": (lambda w: w[:-1], "its shape must be ["),
    "type": (lambda w: w.to(torch.int8), "its type must be bfloat16 or float16 or float32, got "),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_tensor_is_named(tmp_path: Path, architecture: str, kind: str) -> None:
    """vLLM loads any numbers, and says nothing of which tensor does not fit."""
    change, complaint = WRONG[kind]
    served, weights = make(tmp_path, architecture, "cpu")
    name = next(n for n in weights if n.endswith(("o_proj.weight", "attention.dense.weight")))
    wrong = weights | {name: change(weights[name])}
    shape = list(wrong[name].shape)
    with pytest.raises(ValueError, match=re.escape(f"at {name} of shape {shape}: {complaint}")):
        served.load_weights(iter(wrong.items()))


@pytest.mark.parametrize("architecture", ["SDARForCausalLM", "NemotronLabsDiffusionModel"])
@pytest.mark.parametrize("kind", ["tied", "adapters"])
def test_weights_are_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kind: str
) -> None:
    """As after a sleep, which only GPUs do. vLLM then gives each layer tensors of its own, so that
    tied ones are two, and adapters have wrapped the layers."""
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):  # CPUs pack weights
        monkeypatch.setattr(method, "process_weights_after_loading", lambda *_: None)
    plugin.register()
    config = write_config(tmp_path, architecture, tie_word_embeddings=kind == "tied")
    weights = published_weights(build(architecture, config), architecture)
    if kind == "tied":
        weights = {name: weights[name] for name in weights if "_head." not in name}
    save_file(weights, tmp_path / "model.safetensors")
    served, vllm_config = build_any(tmp_path, "cpu", "float32")
    served.load_weights(iter(weights.items()))
    if kind == "adapters":
        device, lora = torch.device("cpu"), LoRAConfig(lora_dtype=torch.float32)
        LoRAModelManager(served, 8, 64, 512, lora, device, vllm_config)
    initialize_layerwise_reload(served)
    served.load_weights((name, weight + 1) for name, weight in weights.items())
    finalize_layerwise_reload(served, vllm_config.model_config)
    first = "model.embed_tokens.weight"
    loaded = dict(served.named_parameters())[first]
    name = first if first in weights else "encoder.embed_tokens.weight"
    assert torch.equal(loaded, weights[name] + 1)
    left = [name for name in weights if "v_proj" not in name]
    with pytest.raises(ValueError, match=r"no weights for .*layers\.0\.self_attn\.v_proj\.weight"):
        served.load_weights((name, weights[name]) for name in left)


def test_experts_with_a_bias_of_the_gate_are_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias is a parameter of the experts, too, and is another tensor then."""
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod):
        monkeypatch.setattr(method, "process_weights_after_loading", lambda *_: None)
    plugin.register()
    config = write_config(tmp_path, "LLaDA2MoeModelLM")
    made = published_weights(build("LLaDA2MoeModelLM", config), "LLaDA2MoeModelLM")
    weights = {name: torch.ones_like(weight) for name, weight in made.items()}
    save_file(weights, tmp_path / "model.safetensors")
    served, _ = build_any(tmp_path, "cpu", "float32")
    served.load_weights(iter(weights.items()))
    initialize_layerwise_reload(served)
    served.load_weights(iter(weights.items()))


def test_a_wrong_scale_is_named(tmp_path: Path) -> None:
    served, weights = make(tmp_path, "SDARForCausalLM", "cpu")
    scale = {"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(96, 1)}
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale .* only hold positive finite"):
        served.load_weights(iter((scale | weights).items()))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ImportError])
def test_an_error_that_is_not_the_checkpoints_stays_as_it_is(
    tmp_path: Path, error: type[Exception]
) -> None:
    served, weights = make(tmp_path, "SDARForCausalLM", "cpu")

    def fail_at_the_second() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights.items()))
        raise error("no")

    with pytest.raises(error, match=r"^no$"):
        served.load_weights(fail_at_the_second())


NEMOTRON = [size for size in SIZES if "Nemotron" in size]


def native(config: dict[str, Any]) -> Ministral3Config:
    """transformers' own, of the same layers."""
    left_out = ("model_type", "architectures", "auto_map", "attn_implementation", "mlp_bias")
    return Ministral3Config(**{key: config[key] for key in config if key not in left_out})


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
