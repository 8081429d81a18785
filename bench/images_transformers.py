"""transformers' DiffusionGemma for `bench.images`: what its `generate` computes of a prompt."""

import os
import time
from pathlib import Path

import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from bench.images_shape import CANVAS, prompts, text
from tests.engine import reference


class Prefills:
    def __init__(self, checkpoint: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.folder = Path(checkpoint)
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def prefill(self, count: int, seed: int) -> dict[str, float]:
        """Times of one batch of prompts with an image each, all of one length."""
        asked = [prompt.inputs for prompt in prompts(self.folder, count, seed)]
        inputs = {name: torch.cat([one[name] for one in asked]) for name in asked[0]}
        encoder, ids = self.model.model.encoder, inputs["input_ids"]
        started = time.perf_counter()
        images = encoder.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
        seen = time.perf_counter()
        cache = DynamicCache(config=self.model.config.text_config)
        positions = torch.arange(ids.shape[1])[None].expand(*ids.shape)
        masks = encoder.create_masks_for_generate(
            config=self.model.config,
            inputs_embeds=torch.empty(*ids.shape, 0),
            attention_mask=torch.ones_like(ids, dtype=torch.bool),
            past_key_values=cache,
            position_ids=positions,
            mm_token_type_ids=inputs["mm_token_type_ids"],
        )
        encoder(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
            mm_encoder_outputs={"image": images},
        )
        ended = time.perf_counter()
        return {"tower_ms": 1000 * (seen - started), "prefill_ms": 1000 * (ended - started)}

    def read(self, count: int, seed: int) -> list[list[list[float]]]:
        """Log-probabilities [C][V] of each canvas' first step."""
        asked = prompts(self.folder, count, seed)
        return [
            reference.first_step_logprobs(self.model, prompt, text(CANVAS, i)).tolist()
            for i, prompt in enumerate(asked)
        ]
