"""The target's model: a small Qwen3 with the tokenizer of diffusiongemma-tiny."""

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from checkpoints.recipes.target_heads import install_look_up
from checkpoints.recipes.tokenizer import BOS_ID, EOS_ID, PAD_ID


def target_config(
    vocab_size: int,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    num_layers: int = 8,
    max_position_embeddings: int = 2048,
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


@torch.no_grad()
def initialize(model: Qwen3ForCausalLM) -> None:
    """Fan-in scaled normal matrices, those that write to the residual stream a quarter of that, so
    that tokens stay visible in it; then the heads of a look-up. Norms stay one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.1 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= 4
            parameter.normal_(0.0, std)
    install_look_up(model)


def save_target(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path, dtype: torch.dtype
) -> None:
    """Writes a copy in `dtype`, with the tokenizer; `model` stays as it is."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    copy.to(dtype).save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)  # save_pretrained lets only the owner read
    tokenizer.save_pretrained(path)
