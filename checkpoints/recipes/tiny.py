"""Random-weight DiffusionGemma checkpoints for tests: loadable, with tokenizer, in milliseconds.

Random weights only test something when every part of the model moves the output: linears keep
activations at unit scale, norm weights and scalars differ from one, the router is sure, and the
embedding is wide enough that logits are peaked without reaching the softcap.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from checkpoints.recipes.architecture import (
    VISION_CONFIG,
    build_config,
    build_generation_config,
)
from checkpoints.recipes.checkpoint import save_checkpoint
from checkpoints.recipes.tokenizer import build_seeing_tokenizer, build_tokenizer

IMAGE_TOKENS = 70  # of an image at most: the fewest that Gemma 4's image processor knows
# Of a tower that may see images of every form: a row or a column of `IMAGE_TOKENS`, too.
SEEING = VISION_CONFIG | {
    "num_hidden_layers": 2,
    "position_embedding_size": IMAGE_TOKENS * VISION_CONFIG["pooling_kernel_size"],
}
LAYER_TYPES = ("sliding_attention",) * 3 + ("full_attention",)


@torch.no_grad()
def randomize_weights(model: torch.nn.Module, seed: int) -> None:
    """Overwrites all weights of `model` in place; encoder and decoder stay tied."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: torch.Size, std: float, mean: float = 0.0) -> torch.Tensor:
        return mean + std * torch.randn(shape, generator=generator, device=device)

    # Tied parameters appear once here, so each is drawn once.
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            # logits = unit-RMS hidden @ E.T have standard deviation 3
            std, mean = 3.0 * parameter.shape[-1] ** -0.5, 0.0
        elif name.endswith("router.proj.weight"):
            std, mean = 2.0, 0.0  # the router multiplies by hidden ** -0.5 itself
        elif parameter.dim() < 2:
            std, mean = 0.1, 1.0
        else:
            std, mean = parameter.shape[-1] ** -0.5, 0.0
        parameter.copy_(normal(parameter.shape, std, mean))
    # Each layer has the scalar twice, as two buffers that hold the same value.
    layers = zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True)
    for encoder_layer, decoder_layer in layers:
        scalar = normal(encoder_layer.layer_scalar.shape, 0.1, 1.0)
        encoder_layer.layer_scalar.copy_(scalar)
        decoder_layer.layer_scalar.copy_(scalar)


def make_tiny_checkpoint(
    path: str | Path,
    *,
    seed: int = 0,
    vocab_size: int | None = None,  # None: the tokenizer's; a larger one has tokens without text
    hidden_size: int = 64,
    intermediate_size: int = 64,
    layer_types: Sequence[str] = LAYER_TYPES,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    num_global_key_value_heads: int = 1,
    global_head_dim: int = 64,
    moe: bool = True,  # False: one expert that every token uses (transformers has no dense form)
    num_experts: int = 4,
    top_k_experts: int = 2,
    moe_intermediate_size: int = 32,
    sliding_window: int = 32,
    canvas_length: int = 32,
    max_position_embeddings: int = 4096,
    max_new_tokens: int = 64,
    vision: bool = True,  # False: no vision tower; vLLM loads that, transformers does not
    sees: bool = False,  # with what a server needs to serve images
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a random DiffusionGemma checkpoint with tokenizer to `path` and returns `path`."""
    path = Path(path)
    tokenizer = build_seeing_tokenizer() if sees else build_tokenizer()
    config = build_config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layer_types=list(layer_types),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        num_global_key_value_heads=num_global_key_value_heads,
        global_head_dim=global_head_dim,
        num_experts=num_experts if moe else 1,
        top_k_experts=top_k_experts if moe else 1,
        moe_intermediate_size=moe_intermediate_size,
        sliding_window=sliding_window,
        canvas_length=canvas_length,
        max_position_embeddings=max_position_embeddings,
        dtype=str(dtype).removeprefix("torch."),
        vision_config=SEEING if sees else VISION_CONFIG,
        sees=sees,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    randomize_weights(model, seed)
    model.generation_config = build_generation_config(max_new_tokens)
    save_checkpoint(model.to(dtype), tokenizer, path, vision=vision)
    if sees:
        Gemma4ImageProcessorPil(
            patch_size=config.vision_config.patch_size,
            pooling_kernel_size=config.vision_config.pooling_kernel_size,
            max_soft_tokens=IMAGE_TOKENS,
        ).save_pretrained(path)
    return path
