"""Images, videos, and prompts that have some."""

from pathlib import Path

import numpy as np
from PIL import Image

from checkpoints.recipes.tokenizer import IMAGE_ID, SPECIAL_TOKENS, VIDEO_ID
from tests.engine import reference
from tests.engine.one_step import Prompt, random_ids

SIZES = [(40, 30), (1, 1), (300, 200), (64, 64), (9, 400), (17, 23)]


def random_image(size: tuple[int, int], seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(256, size=(*reversed(size), 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_prompt(path: Path, parts: list[int], seed: int) -> Prompt:
    """Text of so many tokens, with an image between each two parts: [3, 0, 4] has two images side
    by side behind 3 tokens."""
    vocab_size, marks = 512, len(SPECIAL_TOKENS)
    tokens: list[int] = []
    for i, length in enumerate(parts):
        if i > 0:
            tokens.append(IMAGE_ID)
        text = random_ids(length, vocab_size - marks, seed=seed + i)
        tokens += [marks + token for token in text]
    images = [random_image(SIZES[(seed + i) % len(SIZES)], seed + i) for i in range(len(parts) - 1)]
    if not images:
        return tokens
    return reference.Seen.prepare(path, tokens, images)


def random_video(num_frames: int, size: tuple[int, int], seed: int) -> reference.Video:
    """Of 25 frames a second, of which every 40th is seen."""
    shape = (num_frames, *reversed(size), 3)
    frames = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    indices = [40 * i for i in range(num_frames)]
    return frames, {"fps": 25.0, "frames_indices": indices, "total_num_frames": 40 * num_frames}


def random_prompt_with_videos(path: Path, parts: list[int | str], seed: int) -> reference.Seen:
    """[3, "image", "2 frames", 4] is text of three tokens, an image, a video of two frames and text
    of four tokens."""
    marks = len(SPECIAL_TOKENS)
    tokens: list[int] = []
    images, videos = [], []
    for i, part in enumerate(parts):
        size = SIZES[(seed + i) % len(SIZES)]
        if isinstance(part, int):
            text = random_ids(part, VIDEO_ID - marks, seed=seed + i)
            tokens += [marks + token for token in text]
        elif part == "image":
            tokens.append(IMAGE_ID)
            images.append(random_image(size, seed + i))
        else:
            tokens.append(VIDEO_ID)
            videos.append(random_video(int(part.split()[0]), size, seed + i))
    return reference.Seen.prepare(path, tokens, images, videos)
