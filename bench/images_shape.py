"""A checkpoint of random weights that sees, and the prompts that the bench of images asks it.

The tower has half the widths of the 26B model's (1152, 4304, 16 heads of 72), its patches and its
pooling, 6 of 27 layers, and a quarter of the image tokens: an image takes a CPU core under a
second. The text layers are a quarter as wide as the 26B model's.
"""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from checkpoints.recipes.architecture import build_config, build_generation_config
from checkpoints.recipes.checkpoint import save_checkpoint
from checkpoints.recipes.tiny import randomize_weights
from checkpoints.recipes.tokenizer import IMAGE_ID, SPECIAL_TOKENS, build_tokenizer
from tests.engine.images import random_image
from tests.engine.reference import Seen

CANVAS = 64
MAX_MODEL_LEN = 512
SOFT_TOKENS = 70  # of an image
PICTURE = (480, 320)  # pixels of what is sent: scaled to about as many
TEXT = 16  # tokens before an image, and as many behind it
TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 576,
    "intermediate_size": 2152,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 72,
    "global_head_dim": 72,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": SOFT_TOKENS * 3,
}
LAYERS: dict[str, Any] = {
    "hidden_size": 704,
    "intermediate_size": 528,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_global_key_value_heads": 1,
    "global_head_dim": 128,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 176,
    "sliding_window": 256,
}


def write(folder: Path) -> None:
    tokenizer = build_tokenizer()
    config = build_config(
        vocab_size=len(tokenizer),
        canvas_length=CANVAS,
        max_position_embeddings=MAX_MODEL_LEN,
        dtype="float32",
        vision_config=TOWER,
        sees=True,
        **LAYERS,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    randomize_weights(model, seed=0)
    # Layers that change their input this little do not magnify rounding errors: transformers' own
    # ways to compute attention would otherwise be 0.3 apart.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "post_" in name and "norm" in name:
                parameter.mul_(0.25)
    model.generation_config = build_generation_config(CANVAS)
    save_checkpoint(model, tokenizer, folder)
    Gemma4ImageProcessorPil(
        patch_size=TOWER["patch_size"],
        pooling_kernel_size=TOWER["pooling_kernel_size"],
        max_soft_tokens=SOFT_TOKENS,
    ).save_pretrained(folder)


def text(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(len(SPECIAL_TOKENS), 512) for _ in range(count)]


def prompts(folder: Path, count: int, seed: int) -> list[Seen]:
    """With an image each that no other prompt has."""
    return [
        Seen.prepare(
            folder,
            [*text(TEXT, own), IMAGE_ID, *text(TEXT, own + 1)],
            [random_image(PICTURE, own)],
        )
        for own in (1000 * seed + 2 * i for i in range(count))
    ]
