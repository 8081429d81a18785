"""Random-weight targets and drafters for tests: loadable, with tokenizer, in milliseconds.

Random weights only test something when every part moves the output: norm weights differ from one,
and the embedding is wide enough that best guesses are clear.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from vllm_dllm.checkpoint.tokenizer import BOS_ID, EOS_ID, PAD_ID, build_tokenizer
from vllm_dllm.drafters.training.reference import DFlashDrafter, drafter_config, save_drafter

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
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3ForCausalLM(config)
    randomize_weights(model, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
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
    config = drafter_config(
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
