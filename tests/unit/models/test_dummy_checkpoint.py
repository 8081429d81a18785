"""The benches' checkpoints without weights."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import dummy_checkpoint
from tests.unit.models.building import build


@pytest.mark.parametrize(
    ("scheme", "quantized"),
    [
        ("bf16", set()),
        ("fp8-dynamic", {"mlp", "experts", "self_attn"}),
        ("nvfp4", {"mlp", "experts"}),
        ("w4a16", {"mlp", "experts", "self_attn"}),
    ],
)
def test_a_folder_without_weights(tmp_path: Path, scheme: str, quantized: set[str]) -> None:
    """It becomes a model of the published size, in which the layers of the published checkpoints
    are quantised."""
    dummy_checkpoint.write(tmp_path, "26B", scheme, num_steps=16)
    assert not list(tmp_path.glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(tmp_path)("Sort: b a").input_ids
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["max_denoising_steps"] == 16

    model, _ = build(tmp_path, "meta", dtype="bfloat16")
    layers = [name.split(".") for name, _ in model.named_parameters() if ".layers." in name]
    assert {int(name[2]) for name in layers} == set(range(30))
    assert {name[3] for name in layers if "weight_scale" in name[-1]} == quantized
