"""Weights to reload, and how an engine of the tests is told to."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM


def altered(checkpoint: Path, target: Path) -> Path:
    """A copy whose matrices are others, a little."""
    shutil.copytree(checkpoint, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.dim() == 2 and "embed" not in name:
            drawn = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + 0.3 * weight.std() * drawn.to(weight.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def incomplete(checkpoint: Path, target: Path, name: str) -> Path:
    """The weights of `checkpoint` without the tensor `name`."""
    weights = load_file(checkpoint / "model.safetensors")
    del weights[name]
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def reload(llm: LLM, checkpoint: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})


def sleep_and_wake(llm: LLM) -> None:
    llm.sleep(level=2)
    assert llm.llm_engine.is_sleeping()
    llm.wake_up()
