"""The shipped text model with a vision tower of its own: config, weights to start from, saving."""

from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from checkpoints.recipes.architecture import build_config
from checkpoints.recipes.checkpoint import save_bf16_copy
from checkpoints.recipes.images.drawing import PATCH, POOLING
from checkpoints.recipes.tasks import SERVING_NOTE
from checkpoints.recipes.tiny import IMAGE_TOKENS
from checkpoints.recipes.train import ARCHITECTURE

VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "patch_size": PATCH,
    "position_embedding_size": IMAGE_TOKENS * POOLING,
    "pooling_kernel_size": POOLING,
}

SEEING_NOTE = (
    f"{SERVING_NOTE} Of pictures with 24 x 24 or 48 x 16 pixels, it knows 'What number is shown?', "
    f"'Add the two numbers.' and 'How many red squares?'."
)


def start_seeing(vocab_size: int, text_from: Path) -> DiffusionGemmaForBlockDiffusion:
    """Makes a model in fp32 of the text weights of a checkpoint and a tower with random ones."""
    config = build_config(vocab_size=vocab_size, **ARCHITECTURE, vision_config=VISION, sees=True)
    model = DiffusionGemmaForBlockDiffusion(config).float()
    text = DiffusionGemmaForBlockDiffusion.from_pretrained(text_from).float()
    model.model.decoder.load_state_dict(text.model.decoder.state_dict())
    model.model.encoder.language_model.load_state_dict(
        text.model.encoder.language_model.state_dict()
    )
    initialize_tower(model)
    return model


@torch.no_grad()
def initialize_tower(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Fan-in scaled normal weights; places are told apart from the start."""
    encoder = model.model.encoder
    for part in (encoder.vision_tower, encoder.embed_vision):
        for name, parameter in part.named_parameters():
            if "position_embedding" in name:
                parameter.normal_(0.0, 0.3)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


def save_seeing(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast, path: Path
) -> None:
    """Writes a bf16 copy with what a server needs to take images."""
    save_bf16_copy(model, tokenizer, path, SEEING_NOTE)
    image_processor().save_pretrained(path)


def image_processor() -> Gemma4ImageProcessorPil:
    """Takes images as they are: Gemma 4's would enlarge them to 70 tokens or nearly so."""
    return Gemma4ImageProcessorPil(
        patch_size=PATCH,
        pooling_kernel_size=POOLING,
        max_soft_tokens=IMAGE_TOKENS,
        do_resize=False,
    )
