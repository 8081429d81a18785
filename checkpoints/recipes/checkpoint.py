"""Writes DiffusionGemma checkpoints."""

import json
from pathlib import Path

import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from checkpoints.recipes.architecture import build_generation_config
from checkpoints.recipes.tasks import SERVING_NOTE


def save_bf16_copy(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    note: str = SERVING_NOTE,
) -> None:
    """Writes a bf16 copy; `model` keeps training in fp32. `note` is for those who serve it."""
    copy = DiffusionGemmaForBlockDiffusion(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = build_generation_config()
    copy.config.serving_note = note
    save_checkpoint(copy.to(torch.bfloat16), tokenizer, path)


def save_checkpoint(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    *,
    vision: bool = True,
) -> None:
    """Writes config, generation config, weights (tied ones once) and tokenizer to `path`."""
    state_dict = model.state_dict()
    if not vision:
        state_dict = {
            name: weight
            for name, weight in state_dict.items()
            if ".vision_tower." not in name and ".embed_vision." not in name
        }
    model.save_pretrained(path, state_dict=state_dict)
    tokenizer.save_pretrained(path)
    if not vision:
        config_path = path / "config.json"
        config = json.loads(config_path.read_text())
        config["vision_config"] = None
        config_path.write_text(json.dumps(config, indent=2) + "\n")
