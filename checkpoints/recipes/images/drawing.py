"""Pictures of numbers and of coloured shapes, with a caption that a vision tower can learn first.

They are small, and the model takes them as they are: 8 x 8 pixels become one token. A square of 24
pixels has 9 tokens, a strip for digits side by side has 12.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from checkpoints.recipes.images.digits import draw_digit

PATCH = 4  # pixels
POOLING = 2  # patches in a row, and in a column, that become one token
SQUARE, STRIP = (24, 24), (48, 16)  # width and height in pixels
PAPER = (255, 255, 255)
COLOURS = {"red": (215, 40, 40), "green": (40, 165, 60), "blue": (50, 80, 220)}
SHAPES = ("squares", "circles", "stars")
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
NOTHING = 10 + len(KINDS)
NUM_MARKS = NOTHING + 1
GRID = 3  # cells of shapes in a row and in a column
_CELL = SQUARE[0] // GRID
_FINE = 4  # shapes are drawn this many times larger, for smooth edges

Kind = tuple[str, str]


@dataclass(frozen=True)
class Picture:
    """What there is to see, and what a reader of it would note."""

    image: Image.Image  # RGB, SQUARE or STRIP
    caption: list[list[str]]
    """What the last image tokens stand for: each a few words of the tokenizer."""
    marks: list[int]
    """What each patch shows: a digit, 10 + the number of a kind of shape, or NOTHING."""


def draw_number(rng: random.Random, digit: int, *, held_out: bool) -> Picture:
    """One digit of any size, anywhere in a square."""
    side = rng.randint(12, 22)
    left, top = (rng.randint(0, length - side) for length in SQUARE)
    return _digits(rng, SQUARE, [(digit, side, left, top)], held_out)


def draw_row(rng: random.Random, digits: list[int], *, held_out: bool) -> Picture:
    """Two to four digits, one beside the other."""
    side = rng.randint(10, 12)
    first = rng.randint(0, STRIP[0] - side * len(digits))
    places = [
        (digit, side, first + i * side, rng.randint(0, STRIP[1] - side))
        for i, digit in enumerate(digits)
    ]
    return _digits(rng, STRIP, places, held_out)


def draw_two(rng: random.Random, left: int, right: int, *, held_out: bool) -> Picture:
    """Two digits apart, one in each half of a strip."""
    half = STRIP[0] // 2
    places = []
    for digit, start in ((left, 0), (right, half)):
        side = rng.randint(10, 16)
        place = start + rng.randint(2, half - 2 - side)
        places.append((digit, side, place, rng.randint(0, STRIP[1] - side)))
    return _digits(rng, STRIP, places, held_out)


def _digits(
    rng: random.Random,
    size: tuple[int, int],
    places: list[tuple[int, int, int, int]],  # digit, side, left, top
    held_out: bool,
) -> Picture:
    image = Image.new("RGB", size, PAPER)
    darkness = tuple(rng.randint(0, 60) for _ in range(3))
    width = size[0] // PATCH
    marks = [NOTHING] * (width * size[1] // PATCH)
    for digit, side, left, top in places:
        ink = draw_digit(rng, digit, side, held_out=held_out)
        image.paste(darkness, (left, top), ink)
        for patch in range(len(marks)):
            x, y = (PATCH * place + PATCH // 2 for place in (patch % width, patch // width))
            if left <= x < left + side and top <= y < top + side:
                marks[patch] = digit
    return Picture(image, [[str(digit)] for digit, *_ in places], marks)


def draw_shapes(rng: random.Random, cells: dict[int, Kind]) -> Picture:
    """A shape in each of these cells of the grid. The caption counts all kinds."""
    image = Image.new("RGB", (SQUARE[0] * _FINE, SQUARE[1] * _FINE), PAPER)
    draw = ImageDraw.Draw(image)
    width, patches = SQUARE[0] // PATCH, _CELL // PATCH
    marks = [NOTHING] * width**2
    for cell, (colour, shape) in cells.items():
        fill = tuple(max(0, min(255, value + rng.randint(-25, 25))) for value in COLOURS[colour])
        radius = _FINE * rng.uniform(3.0, 4.0)
        row, column = divmod(cell, GRID)
        _draw_shape(
            draw, shape, (column + 0.5) * _CELL * _FINE, (row + 0.5) * _CELL * _FINE, radius, fill
        )
        for y in range(row * patches, (row + 1) * patches):
            for x in range(column * patches, (column + 1) * patches):
                marks[y * width + x] = 10 + KINDS.index((colour, shape))
    counts = [list(cells.values()).count(kind) for kind in KINDS]
    caption = [[*kind_words(kind), str(count)] for kind, count in zip(KINDS, counts, strict=True)]
    return Picture(image.resize(SQUARE, Image.Resampling.BOX), caption, marks)


def kind_words(kind: Kind) -> list[str]:
    """What a caption says of a kind: the first token of its colour and of its shape."""
    colour, shape = kind
    return [colour[0], "star" if shape == "stars" else shape[0]]


def _draw_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    x: float,
    y: float,
    radius: float,
    fill: tuple[int, ...],
) -> None:
    box = (x - radius, y - radius, x + radius - 1, y + radius - 1)
    if shape == "squares":
        draw.rectangle(box, fill)
    elif shape == "circles":
        draw.ellipse(box, fill)
    else:
        points = []
        for i in range(10):  # a star of five points
            length = radius * (1.15 if i % 2 == 0 else 0.5)
            angle = math.pi * (i / 5 - 0.5)
            points.append((x + length * math.cos(angle), y + length * math.sin(angle)))
        draw.polygon(points, fill)
