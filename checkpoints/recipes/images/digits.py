"""Handwritten digits of scikit-learn's `load_digits`, a part of which training never sees.

scikit-learn comes with the extra `eval`; only drawing needs it.
"""

import random
from functools import cache

import numpy as np
from PIL import Image

HELD_OUT_SHARE = 6  # one digit in this many is held out
SPLIT_SEED = 1
SIDE = 8  # pixels of a digit as it comes


@cache
def _sides() -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Gives the inks [8, 8] (float32, 0 to 1) of every digit: for training, and held out."""
    from sklearn.datasets import load_digits

    ink, labels = load_digits(return_X_y=True)
    order = list(range(len(labels)))
    random.Random(SPLIT_SEED).shuffle(order)
    sides: tuple[list[list[np.ndarray]], list[list[np.ndarray]]] = (
        [[] for _ in range(10)],
        [[] for _ in range(10)],
    )
    for place, index in enumerate(order):
        side = sides[place % HELD_OUT_SHARE == 0]
        side[labels[index]].append((ink[index].reshape(SIDE, SIDE) / 16).astype(np.float32))
    return sides


def digit_inks(digit: int, *, held_out: bool) -> list[np.ndarray]:
    """All examples of a digit, each [8, 8] float32 from 0 (paper) to 1 (ink)."""
    return _sides()[held_out][digit]


def draw_digit(rng: random.Random, digit: int, side: int, *, held_out: bool) -> Image.Image:
    """Ink of one example, `side` pixels wide and high, as an image of mode L (255 is ink).

    Those for training are turned, leaned and stretched a little, for there are few of them.
    """
    ink = rng.choice(digit_inks(digit, held_out=held_out))
    image = Image.fromarray((ink * 255).astype(np.uint8))
    scale = SIDE / side
    a, b, c, d, left, top = scale, 0.0, 0.0, scale, 0.0, 0.0
    if not held_out:
        angle, lean = rng.gauss(0, 0.1), rng.gauss(0, 0.1)  # radians, pixels a pixel
        a, d = scale * rng.uniform(0.9, 1.1), scale * rng.uniform(0.9, 1.1)
        b, c = scale * (lean - angle), scale * angle
        left, top = rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)
    # The middle of the drawing shows the middle of the digit.
    middle, half = SIDE / 2, side / 2
    matrix = (
        a,
        b,
        middle + left - (a + b) * half,
        c,
        d,
        middle + top - (c + d) * half,
    )
    return image.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
