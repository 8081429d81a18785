"""Builds the served model as a worker does, without a worker."""

import re
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model

from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as ServedModel

FP8 = torch.float8_e4m3fn


def build(
    checkpoint: Path, device: str, dtype: str = "float32", *, images: bool = False
) -> tuple[ServedModel, VllmConfig]:
    """`images`: as they are served, which takes a tokenizer."""
    model, config = build_any(checkpoint, device, dtype, images=images)
    assert isinstance(model, ServedModel)
    return model, config


def build_any(
    checkpoint: Path, device: str, dtype: str, *, images: bool = False
) -> tuple[nn.Module, VllmConfig]:
    """Of any architecture."""
    config = EngineArgs(
        str(checkpoint),
        dtype=dtype,
        max_model_len=1024,
        enforce_eager=True,
        skip_tokenizer_init=not images,
        load_format="dummy" if device == "meta" else "auto",  # there are no weights to be read
    ).create_engine_config()
    # vLLM shares rotations of equal settings, also those on the meta device.
    own_rotations = patch.dict(rotary_embedding._ROPE_DICT, clear=True)
    with set_current_vllm_config(config), torch.device(device), own_rotations:
        model = initialize_model(config)
    return model, config


def to_fp8(
    weights: Mapping[str, torch.Tensor],
    *ignored: str,  # patterns of modules
) -> dict[str, torch.Tensor]:
    """As llm-compressor's FP8_DYNAMIC saves the linears of a masked model's layers."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        in_layers = ".layers." in name and module != name and weight.dim() == 2
        if not in_layers or any(re.fullmatch(pattern, module) for pattern in ignored):
            found[name] = weight
            continue
        found[name] = weight.to(FP8)
        found[f"{name}_scale"] = torch.empty(
            len(weight), 1, dtype=torch.bfloat16, device=weight.device
        )
    return found
