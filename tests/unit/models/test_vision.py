"""The vision tower computes what transformers' does, to the bit."""

import copy

import torch
from transformers import DiffusionGemmaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionMLP

from bench.images_shape import LAYERS, TOWER
from checkpoints.recipes.architecture import build_config
from vllm_dllm.models import vision


def config() -> DiffusionGemmaConfig:
    return build_config(
        vocab_size=512,
        canvas_length=64,
        max_position_embeddings=512,
        dtype="float32",
        vision_config={**TOWER, "num_hidden_layers": 2},
        sees=True,
        **LAYERS,
    )


def with_transformers_mlps(tower: torch.nn.Module) -> torch.nn.Module:
    theirs = copy.deepcopy(tower)
    for module in theirs.modules():
        if isinstance(module, vision.InPlaceMLP):
            module.__class__ = Gemma4VisionMLP
    return theirs


@torch.inference_mode()
def test_same_bits() -> None:
    tower, _ = vision.build_tower(config(), torch.float32)
    draws = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draws) / parameter.shape[-1] ** 0.5)
    assert sum(isinstance(module, vision.InPlaceMLP) for module in tower.modules()) == 2
    patches = torch.rand(1, 54, 768, generator=draws)
    positions = torch.tensor([[[x, y] for y in range(6) for x in range(9)]])
    asked = {"pixel_values": patches, "pixel_position_ids": positions}
    ours, theirs = tower(**asked), with_transformers_mlps(tower)(**asked)
    assert ours.last_hidden_state.isfinite().all()
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
