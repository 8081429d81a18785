"""Random-weight targets and drafters for tests: loadable, with tokenizer, in milliseconds.

Random weights only test something when every part moves the output: norm weights differ from one,
and the embedding is wide enough that best guesses are clear.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from checkpoints.recipes.target_model import save_target, target_config
from checkpoints.recipes.tokenizer import build_tokenizer
from vllm_dllm.tools.drafter.reference import DFlashDrafter, make_drafter_config, save_drafter

MASK_TOKEN = "<unused0>"


@torch.no_grad()
def randomize_weights(model: nn.Module, seed: int) -> None:
    """Overwrites all weights of `model` in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        std, mean = parameter.shape[-1] ** -0.5, 0.0
        if "embed_tokens" in name:
            std = 3.0 * parameter.shape[-1] ** -0.5
        elif parameter.dim() < 2:
            std, mean = 0.1, 1.0
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


def make_tiny_target(
    path: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a random Qwen3 with tokenizer to `path` and returns `path`."""
    tokenizer = build_tokenizer()
    config = target_config(
        len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=96,
        num_layers=num_layers,
        max_position_embeddings=1024,
    )
    model = Qwen3ForCausalLM(config)
    randomize_weights(model, seed)
    save_target(model, tokenizer, path, dtype)
    return path


def make_tiny_drafter(
    path: Path,
    target: Path,
    *,
    seed: int = 1,
    num_layers: int = 2,
    target_layer_ids: tuple[int, ...] = (0, 2),
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a random drafter for the target in `target` to `path` and returns `path`."""
    mask_token_id = build_tokenizer().convert_tokens_to_ids(MASK_TOKEN)
    config = make_drafter_config(
        Qwen3Config.from_pretrained(target),
        num_layers=num_layers,
        target_layer_ids=target_layer_ids,
        mask_token_id=mask_token_id,
        block_size=block_size,
    )
    drafter = DFlashDrafter(config)
    randomize_weights(drafter, seed)
    save_drafter(drafter, path, dtype)
    return path
