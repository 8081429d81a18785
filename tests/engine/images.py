"""Images and prompts that have some."""

from pathlib import Path

import numpy as np
from PIL import Image

from checkpoints.recipes.tokenizer import IMAGE_ID, SPECIAL_TOKENS
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
