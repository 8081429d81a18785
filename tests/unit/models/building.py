"""Builds the served model as a worker does, without a worker."""

from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as ServedModel


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
    with set_current_vllm_config(config), torch.device(device):
        model = initialize_model(config)
    return model, config
