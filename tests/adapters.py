"""LoRA adapters of random numbers."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = Mapping[str, torch.Tensor]


def make_adapter(path: Path, checkpoint: Path, layers: list[str], seed: int, rank: int) -> Weights:
    """A random one in PEFT's format; returns what it adds to the checkpoint's weights."""
    generator = torch.Generator().manual_seed(seed)
    pairs, added = {}, {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in layers and ".experts." not in name:
            n, k = weight.shape
            a = torch.randn(rank, k, generator=generator) * k**-0.5
            b = torch.randn(n, rank, generator=generator) * 0.2
            pairs[f"base_model.model.{layer}.lora_A.weight"] = a
            pairs[f"base_model.model.{layer}.lora_B.weight"] = b
            added[name] = 2 * b @ a
    path.mkdir()
    save_file(pairs, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": layers,
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return added
