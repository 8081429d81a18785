"""Checkpoint folders without weights, for engines that make them up (`--load-format dummy`).

    python -m bench.dummy_checkpoint FOLDER --scheme nvfp4

The tokenizer is the shipped checkpoint's; if the vocabulary is larger, the rest has no text.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from bench.harness import ROOT
from checkpoints.recipes.architecture import VISION_CONFIG, build_generation_config
from checkpoints.recipes.tokenizer import BOI_ID, BOS_ID, EOI_ID, EOS_ID, IMAGE_ID, PAD_ID
from vllm_dllm.tools.quantize.plan import quantization_scheme

CANVAS = 256
SHAPE_26B: dict[str, Any] = {  # of the text model of google/diffusiongemma-26B-A4B-it
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
# An eighth of most widths: to try the bench on a CPU.
SHAPE_SMALL: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 352,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "sliding_window": 128,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 96,
}
# What a laptop might serve: 267 million weights, 192 million of them used by each canvas token.
SHAPE_267M: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 1056,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "global_head_dim": 256,
    "num_global_key_value_heads": 1,
    "sliding_window": 256,
    "num_experts": 8,
    "top_k_experts": 4,
    "moe_intermediate_size": 512,
}
SHAPE_4M: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "sliding_window": 128,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
}
SHAPE_60M: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "sliding_window": 256,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 256,
}
SHAPE_1B: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "sliding_window": 512,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 768,
}
SHAPES = {
    "26B": SHAPE_26B,
    "small": SHAPE_SMALL,
    "4M": SHAPE_4M,
    "60M": SHAPE_60M,
    "267M": SHAPE_267M,
    "1B": SHAPE_1B,
}

# As RedHatAI publishes them: NVFP4 leaves the attention in bf16.
KEPT = ["lm_head", "re:.*(embed|vision|self_conditioning|router).*"]
SCHEMES: dict[str, list[str] | None] = {  # what a scheme leaves as it is
    "bf16": None,
    "fp8-dynamic": KEPT,
    "nvfp4": [*KEPT, "re:.*self_attn.*"],
    "w4a16": KEPT,
}


def write(folder: Path, shape: str, scheme: str, num_steps: int, **changed: Any) -> None:
    """config.json and generation_config.json: a key of SHAPES, a key of SCHEMES, how many denoising
    steps a canvas takes at most, and what differs from the shape. Canvases of random weights take
    all steps."""
    tokens = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": BOS_ID}
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**SHAPES[shape] | changed, **tokens, dtype="bfloat16"),
        vision_config=dict(VISION_CONFIG),
        canvas_length=CANVAS,
        boi_token_id=BOI_ID,
        eoi_token_id=EOI_ID,
        image_token_id=IMAGE_ID,
        dtype="bfloat16",
        **tokens,
    )
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    config.save_pretrained(folder)
    if (kept := SCHEMES[scheme]) is not None:
        path = folder / "config.json"
        described = json.loads(path.read_text())
        path.write_text(json.dumps(described | {"quantization_config": _quantized(scheme, kept)}))
    generation = build_generation_config(CANVAS)
    generation.max_denoising_steps = num_steps
    generation.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "checkpoints" / "diffusiongemma-tiny" / name, folder)


def add_weights(folder: Path) -> None:
    """Random ones, in bf16, for systems that do not make them up. The same each time."""
    torch.manual_seed(0)
    config = DiffusionGemmaConfig.from_pretrained(folder)
    model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.bfloat16)
    model.generation_config = DiffusionGemmaGenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)


def _quantized(scheme: str, kept: list[str]) -> dict[str, Any]:
    preset = quantization_scheme(scheme)
    return QuantizationConfig(
        config_groups={"group_0": preset},
        format=preset.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=kept,
    ).model_dump(mode="json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="26B")
    parser.add_argument("--scheme", choices=SCHEMES, default="bf16")
    parser.add_argument("--steps", type=int, default=16, help="per canvas")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder, args.shape, args.scheme, args.steps)


if __name__ == "__main__":
    main()
