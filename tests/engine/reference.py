"""transformers' DiffusionGemma (eager, fp32): the definition of right for these tests."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DynamicCache,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler
from transformers.models.gemma4 import image_processing_pil_gemma4 as with_pillow
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.video_utils import VideoMetadata

from checkpoints.recipes.tokenizer import VIDEO_ID
from tests.engine.parting import Decisions, Grounds
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion


def load(path: Path | str) -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


PROCESSING = "transformers.models.gemma4."
Video = tuple[np.ndarray, dict[str, Any]]
"""Frames [n, height, width, 3] uint8, and vLLM's metadata of them."""


@dataclass(frozen=True)
class Seen:
    """A prompt with images and videos, as a client sends it and as transformers' `generate` takes
    it."""

    tokens: list[int]  # with one image token for each image, and one video token for each video
    images: list[Image.Image]
    inputs: dict[str, torch.Tensor]  # of `generate`
    videos: Sequence[Video] = ()

    @classmethod
    def prepare(
        cls, path: Path, tokens: list[int], images: list[Image.Image], videos: Sequence[Video] = ()
    ) -> "Seen":
        """As transformers' image processor and `Gemma4Processor`, which needs torchvision, do.

        The model takes the features of frames as those of images, in the places of image tokens;
        the types of tokens, which masks are made of, say which are a video's.
        """
        config = DiffusionGemmaConfig.from_pretrained(path)
        processor = Gemma4ImageProcessorPil.from_pretrained(path)
        images_left, videos_left = iter(images), iter(videos)
        ids: list[int] = []
        made = []
        for token in tokens:
            if token == config.image_token_id:
                made.append(processor([next(images_left)], return_tensors="pt"))
                image = [token] * made[-1]["num_soft_tokens_per_image"].item()
                ids += [config.boi_token_id, *image, config.eoi_token_id]
            elif videos and token == VIDEO_ID:
                frames, metadata = next(videos_left)
                made.append(processor([Image.fromarray(x) for x in frames], return_tensors="pt"))
                ids += _video_ids(path, made[-1]["num_soft_tokens_per_image"][0].item(), metadata)
            else:
                ids.append(token)
        sent = torch.tensor([ids])
        is_image, is_frame = sent == config.image_token_id, (sent == VIDEO_ID) & bool(videos)
        inputs = {
            "input_ids": sent.masked_fill(is_frame, config.image_token_id),
            "mm_token_type_ids": is_image + 2 * is_frame,
            "pixel_values": torch.cat([one["pixel_values"] for one in made]),
            "image_position_ids": torch.cat([one["image_position_ids"] for one in made]),
        }
        return cls(tokens, images, inputs, videos)

    @property
    def engine_input(self) -> dict[str, Any]:
        media = {"image": self.images, "video": list(self.videos)}
        present = {kind: items for kind, items in media.items() if items}
        return {"prompt_token_ids": self.tokens, "multi_modal_data": present}

    @property
    def ids(self) -> list[int]:
        """As the model sees them."""
        return self.inputs["input_ids"][0].tolist()

    def __len__(self) -> int:
        return len(self.ids)


def _video_ids(path: Path, num_frame_tokens: int, metadata: dict[str, Any]) -> list[int]:
    """What transformers' processor puts in the place of a video."""
    # Its file needs two names of one that needs torchvision. Pillow's processor has them, too.
    with patch.dict(sys.modules, {PROCESSING + "image_processing_gemma4": with_pillow}):
        processor = import_module(PROCESSING + "processing_gemma4").Gemma4Processor
    tokenizer = AutoTokenizer.from_pretrained(path)
    marks = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>")
    made = {
        "num_soft_tokens_per_video": [num_frame_tokens],
        "video_metadata": [
            VideoMetadata(
                total_num_frames=metadata["total_num_frames"],
                fps=metadata["fps"],
                frames_indices=metadata["frames_indices"],
            )
        ],
    }
    text = processor.replace_video_token(marks, made, 0)
    return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def first_step_logprobs(
    model: DiffusionGemmaForBlockDiffusion, prompt: list[int] | Seen, canvas: list[int]
) -> torch.Tensor:
    """Log-probabilities [C, V] of a canvas' first denoising step, at temperature 1."""
    if isinstance(prompt, Seen):
        inputs = _forward_inputs(model, prompt)
    else:
        inputs = {"input_ids": torch.tensor([prompt])}
    logits = model(**inputs, decoder_input_ids=torch.tensor([canvas])).logits
    return logits[0].log_softmax(-1)


def _forward_inputs(model: DiffusionGemmaForBlockDiffusion, prompt: Seen) -> dict[str, Any]:
    """With the masks that `generate` makes: the model's own forward drops them, so an image's
    tokens would not see each other."""
    encoder, inputs = model.model.encoder, prompt.inputs
    ids = inputs["input_ids"]
    cache = DynamicCache(config=model.config.text_config)
    positions = torch.arange(ids.shape[1])[None]
    masks = encoder.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(*ids.shape, 0),
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        past_key_values=cache,
        position_ids=positions,
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )
    seen = encoder.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
    return {
        "input_ids": ids,
        "attention_mask": masks,
        "past_key_values": cache,
        "mm_encoder_outputs": {"image": seen},
    }


@dataclass
class Trajectory:
    """What `generate` did, step by step; a step is [best guess, accepted, next canvas]."""

    steps: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    block_lengths: list[int] = field(default_factory=list)  # steps of each block
    tokens: list[int] = field(default_factory=list)  # committed, the prompt left out
    grounds: list[Grounds] = field(default_factory=list)  # of each step; the reference's only
    logprobs: list[float] = field(default_factory=list)  # of `tokens`, on the step that chose them

    def decisions(self) -> list[Decisions]:
        """Of each step. A finished block's canvas is the next forward's input: we commit the best
        guess, the reference's loop ends without reading it."""
        ends = {end - 1 for end in itertools.accumulate(self.block_lengths)}
        return [
            Decisions(guess, accepted, guess if i in ends else canvas, i in ends)
            for i, (guess, accepted, canvas) in enumerate(self.steps)
        ]


@torch.inference_mode()
def generate_with_noise(
    model: DiffusionGemmaForBlockDiffusion, prompt: list[int] | Seen, seed: int, max_new_tokens: int
) -> Trajectory:
    """Runs transformers' own `generate` on the noise that a request with this seed sees."""
    trajectory = Trajectory()
    best_guess_logprobs: list[list[float]] = []
    with same_noise(model, seed, len(prompt), trajectory, best_guess_logprobs):
        is_seen = isinstance(prompt, Seen)
        inputs = prompt.inputs if is_seen else {"input_ids": torch.tensor([prompt])}
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, eos_token_id=None)
    trajectory.tokens = output.sequences[0, len(prompt) :].tolist()
    last_steps = itertools.accumulate(trajectory.block_lengths)
    trajectory.logprobs = [x for end in last_steps for x in best_guess_logprobs[end - 1]]
    return trajectory


@contextmanager
def same_noise(
    model: DiffusionGemmaForBlockDiffusion,
    seed: int,
    prompt_len: int,
    trajectory: Trajectory,
    best_guess_logprobs: list[list[float]],  # of each step, temperature-scaled
) -> Iterator[None]:
    """Feeds `vllm_dllm.denoise.noise` to the two draws of the reference loop and records it.

    The loop draws a canvas with `initialize_canvas`, once when a block starts and then after every
    `multinomial`, which draws a step's candidates.
    """
    canvas_length = model.config.canvas_length
    vocab_size = model.config.text_config.vocab_size
    key = noise.keys_from_seeds(torch.tensor([seed]))
    draws: list[torch.Tensor] = []
    position = {"block": -1, "step": 0, "candidates drawn": False}

    def keys() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start = prompt_len + position["block"] * canvas_length
        return (
            key,
            torch.arange(start, start + canvas_length)[None],
            torch.tensor([position["step"]]),
        )

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        position["candidates drawn"] = True
        draw = noise.uniform(*keys(), noise.CANDIDATE)[0]
        draws.append(draw.double())
        return sample_by_inversion(probs, draw)[:, None]

    def initialize_canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
        if position["candidates drawn"]:
            position["candidates drawn"] = False
            tokens = noise.uniform_tokens(*keys(), noise.RENOISE, vocab_size)
            position["step"] += 1
            return tokens
        position["block"] += 1
        position["step"] = 0
        trajectory.block_lengths.append(0)
        return noise.uniform_tokens(*keys(), noise.INITIAL, vocab_size)

    denoising_step = type(model)._denoising_step
    accepted: list[torch.Tensor] = []
    accept_canvas = EntropyBoundSampler.accept_canvas

    def recording_accept(self, *args, **kwargs):
        canvas = accept_canvas(self, *args, **kwargs)
        accepted.append(self.accepted_token_mask)
        return canvas

    def recording_step(self, **kwargs):
        canvas, best_guess, logits, finished = denoising_step(self, **kwargs)
        trajectory.steps.append(
            (best_guess[0].tolist(), accepted[-1][0].int().tolist(), canvas[0].tolist())
        )
        trajectory.block_lengths[-1] += 1
        trajectory.grounds.append(Grounds(logits[0].double().log_softmax(-1), draws[-1]))
        best_guess_logprobs.append(logits[0].log_softmax(-1).amax(-1).tolist())
        return canvas, best_guess, logits, finished

    with (
        patch.object(torch, "multinomial", multinomial),
        patch.object(EntropyBoundSampler, "initialize_canvas", initialize_canvas),
        patch.object(EntropyBoundSampler, "accept_canvas", recording_accept),
        patch.object(type(model), "_denoising_step", recording_step),
    ):
        yield
