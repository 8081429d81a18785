"""A small bf16 checkpoint in shards, prompts to calibrate with, and what is quantised from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.unit.tools.quantize.quantized_files import INDEX
from vllm_dllm.tools.quantize.quantize import quantize

PROMPTS = [
    {"messages": [{"role": "user", "content": "Sort: d a c"}]},
    {"prompt": "Count from 12 to 19."},
    {"messages": [{"role": "user", "content": "Add 31 and 03."}]},
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """bf16, in three shards that part q from k, and experts from the rest of their layer."""
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[i::3]}, path / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    generation = json.loads((path / "generation_config.json").read_text())
    generation["max_denoising_steps"] = 3  # a random model never converges
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    return path


def quantised(scheme: str) -> Any:
    """A fixture: the checkpoint, quantised."""

    @pytest.fixture(scope="session")
    def made(checkpoint, prompts, tmp_path_factory) -> Path:
        out = tmp_path_factory.mktemp(scheme) / "out"
        quantize(checkpoint, scheme, out, prompts if scheme == "nvfp4" else None)
        return out

    return made


fp8, fp4, int8, int4 = map(quantised, ("fp8-dynamic", "nvfp4", "int8", "w4a16"))
