"""The DiffusionGemma configuration of our small checkpoints, in the shape of the published model.

google/diffusiongemma-26B-A4B-it has hidden 2816, 30 layers, head_dim 256 (512 on full-attention
layers), 16 heads over 8 (2) KV heads, 128 experts of width 704 with top 8, dense width 2112, window
1024 and canvas 256. Ours keeps every ratio that changes code paths: GQA, another head size and
fewer KV heads on full layers, a shared expert branch next to a dense one, tied embeddings, softcap.
"""

from collections.abc import Mapping
from typing import Any

from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from checkpoints.recipes.tokenizer import BOI_ID, BOS_ID, EOI_ID, EOS_ID, IMAGE_ID, PAD_ID

# transformers builds a vision tower for every DiffusionGemma, so the smallest possible one is
# there. It is not trained.
VISION_CONFIG: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 32,
    "patch_size": 4,
    "position_embedding_size": 16,
    "pooling_kernel_size": 2,
}


def build_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layer_types: list[str],
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    num_global_key_value_heads: int,
    global_head_dim: int,
    num_experts: int,
    top_k_experts: int,
    moe_intermediate_size: int,
    sliding_window: int,
    canvas_length: int,
    max_position_embeddings: int = 4096,
    dtype: str = "bfloat16",
    vision_config: Mapping[str, Any] = VISION_CONFIG,
    sees: bool = False,  # the tokens of an image see each other both ways
) -> DiffusionGemmaConfig:
    """A config that both transformers' DiffusionGemma and vLLM's Gemma4 backbone read."""
    text_config = DiffusionGemmaTextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        num_global_key_value_heads=num_global_key_value_heads,
        global_head_dim=global_head_dim,
        num_experts=num_experts,
        top_k_experts=top_k_experts,
        moe_intermediate_size=moe_intermediate_size,
        sliding_window=sliding_window,
        max_position_embeddings=max_position_embeddings,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        use_bidirectional_attention="vision" if sees else None,
        dtype=dtype,
    )
    return DiffusionGemmaConfig(
        text_config=text_config,
        vision_config=dict(vision_config),
        canvas_length=canvas_length,
        boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID,
        image_token_id=IMAGE_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        dtype=dtype,
    )


def build_generation_config(max_new_tokens: int = 256) -> DiffusionGemmaGenerationConfig:
    """The sampler defaults of the published model, written out in full."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=max_new_tokens,
        max_denoising_steps=48,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
        t_min=0.4,
        t_max=0.8,
        stability_threshold=1,
        confidence_threshold=0.005,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
    )
