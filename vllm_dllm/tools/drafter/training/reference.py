"""The DFlash drafter in plain PyTorch: the definition of right, and what training trains.

A drafter has no vocabulary of its own. A block is the embedding of [anchor, mask, mask, …] by the
target's table, where the anchor is the token sampled last; the mask at position p guesses the token
at p, through the target's LM head. Every layer attends, without a causal mask, to the block and the
context: all tokens whose target states are known, which is every token before the anchor. The
context is not run through the layers: keys and values of each layer are projected straight from
the target's states. Same numbers as vLLM 0.32's `qwen3_dflash.py`; "DFlash: Block Diffusion for
Flash Speculative Decoding" (arXiv:2602.06036).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm_dllm.errors import InputError

ARCHITECTURE = "DFlashDraftModel"
WEIGHTS_FILE = "model.safetensors"
FROM_TARGET = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)

ContextKV = list[tuple[Tensor, Tensor]]
"""Each layer's keys, with norm and rotation, and values; [B, kv_heads, C, head_dim] each."""


def drafter_config(
    target: Any,  # the target's text config
    *,
    num_layers: int,
    target_layer_ids: Sequence[int],  # 0-based; the outputs of these layers are the context
    mask_token_id: int,
    block_size: int,
) -> Qwen3Config:
    """Describes a drafter as wide as its target, laid out as the published ones
    (z-lab/…-DFlash)."""
    return Qwen3Config(
        architectures=[ARCHITECTURE],
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        tie_word_embeddings=False,
        use_cache=False,
        block_size=block_size,
        num_target_layers=target.num_hidden_layers,
        dflash_config={
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
        },
        **{name: getattr(target, name) for name in FROM_TARGET},
    )


class DFlashAttention(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def keys_values(
        self,
        hidden: Tensor,  # [B, T, H]
        rotation: tuple[Tensor, Tensor],  # cos, sin [B, T, head_dim]
    ) -> tuple[Tensor, Tensor]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2)
        values = self.v_proj(hidden).view(shape).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *rotation)[1], values

    def forward(
        self,
        hidden: Tensor,  # [B, Q, H]
        rotation: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],  # keys, values [B, kv_heads, C, head_dim]
        visible: Tensor | None,  # [B, Q, C + Q] bool; None: every query sees every key
    ) -> Tensor:
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        queries = queries.transpose(1, 2)
        queries = apply_rotary_pos_emb(queries, queries, *rotation)[0]
        keys, values = self.keys_values(hidden, rotation)
        output = F.scaled_dot_product_attention(
            queries,
            torch.cat((context[0], keys), dim=2),
            torch.cat((context[1], values), dim=2),
            attn_mask=None if visible is None else visible[:, None],
            enable_gqa=True,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))


class DFlashLayer(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        visible: Tensor | None,
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, context, visible)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashDrafter(nn.Module):
    """The whole drafter; its parameters are named as in the published checkpoints."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.mask_token_id: int = config.dflash_config["mask_token_id"]
        self.target_layer_ids: list[int] = config.dflash_config["target_layer_ids"]
        states_size = len(self.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(states_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)  # holds no weights

    def context_kv(
        self,
        states: Tensor,  # [B, C, layers · H], the target's states side by side
        positions: Tensor,  # [B, C] int64
    ) -> ContextKV:
        context = self.hidden_norm(self.fc(states))
        rotation = self.rotary(context, positions)
        return [layer.self_attn.keys_values(context, rotation) for layer in self.layers]

    def forward(
        self,
        embeddings: Tensor,  # [B, Q, H] of blocks, by the target's table
        positions: Tensor,  # [B, Q] int64
        context: ContextKV,
        visible: Tensor | None = None,  # [B, Q, C + Q] bool, True: the query sees the key
    ) -> Tensor:
        """Gives [B, Q, H] for the target's LM head. Without `visible` all queries are one block."""
        rotation = self.rotary(embeddings, positions)
        hidden = embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            hidden = layer(hidden, rotation, layer_context, visible)
        return self.norm(hidden)


def save_drafter(drafter: DFlashDrafter, path: Path, dtype: torch.dtype) -> None:
    """Writes config.json and the weights as `dtype` into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    drafter.config.dtype = dtype
    drafter.config.save_pretrained(path)
    weights = {name: w.detach().to(dtype) for name, w in drafter.state_dict().items()}
    save_file(weights, path / WEIGHTS_FILE, metadata={"format": "pt"})
    (path / WEIGHTS_FILE).chmod(0o644)  # save_file lets only the owner read


def load_drafter(path: Path, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """Loads a drafter from a folder in the published layout: full attention, one weights file."""
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path} holds no drafter: expected config.json and {WEIGHTS_FILE}")
    config = Qwen3Config.from_dict(json.loads(config_file.read_text()))
    if config.architectures != [ARCHITECTURE]:
        raise InputError(
            f"{config_file}: expected architectures [{ARCHITECTURE!r}], got {config.architectures}"
        )
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(load_file(path / WEIGHTS_FILE))
    return drafter.to(dtype).eval()
