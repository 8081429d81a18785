"""Masked models' checkpoints: no tensor may be missing, and a wrong one is named."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config.lora import LoRAConfig
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.engine.masked import CONFIGS, build, published_weights
from tests.unit.models.building import build_any
from vllm_dllm import plugin
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.quantization.complete_weights import weights_in_parts

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
def test_a_missing_tensor_is_named(tmp_path: Path, architecture: str) -> None:
    served, weights = make(tmp_path, architecture, "meta")
    served.load_weights(iter(weights.items()))
    for name in filter(_IS_TRIED, weights):
        left = {key: weight for key, weight in weights.items() if key != name}
        assert len(left) == len(weights) - 1
        with pytest.raises(
            ValueError, match=re.escape(f"no weights for {name}. Check that its files")
        ):
            served.load_weights(iter(left.items()))
    with weights_in_parts():
        for part in weights.items():
            served.load_weights(iter([part]))


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nan": (lambda w: torch.full_like(w, math.nan), "its numbers must be finite, got "),
    "shape": (lambda w: w[:-1], "its shape does not fit config.json"),
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
