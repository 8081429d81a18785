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
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("global_head_dim", "num_global_key_value_heads", "sliding_window"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, sizes in {
        # Of the text model of google/diffusiongemma-26B-A4B-it.
        "26B": (262_144, 2816, 2112, 30, *(16, 8, 256), *(512, 2, 1024), *(128, 8, 704)),
        # An eighth of most widths: to try the bench on a CPU.
        "small": (32_768, 352, 256, 6, *(4, 2, 64), *(128, 1, 128), *(16, 4, 96)),
        "4M": (8192, 128, 256, 6, *(4, 2, 32), *(64, 1, 128), *(8, 2, 128)),
        "60M": (32_768, 512, 768, 8, *(8, 4, 64), *(128, 1, 256), *(8, 2, 256)),
        # What a laptop might serve: 192 million weights are used by each canvas token.
        "267M": (32_768, 1024, 1056, 12, *(8, 4, 128), *(256, 1, 256), *(8, 4, 512)),
        "1B": (32_768, 2048, 2048, 16, *(8, 4, 256), *(512, 1, 512), *(8, 2, 768)),
    }.items()
}
SHAPE_26B = SHAPES["26B"]

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
