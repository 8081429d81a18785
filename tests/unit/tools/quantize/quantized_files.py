"""What a checkpoint's folder holds."""

from pathlib import Path

import torch
from safetensors.torch import load_file

INDEX = "model.safetensors.index.json"
LAYER = "model.decoder.layers.0."


def read(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
