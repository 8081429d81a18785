"""A small picture in a terminal: two pixels in a character, one above the other."""

import numpy as np
from PIL import Image
from rich.text import Text

UPPER_HALF = "▀"
SHADES = " ░▒▓█"  # from paper to ink


def half_blocks(image: Image.Image) -> Text:  # RGB
    """Draws in colours: a character's foreground is the upper pixel, its background the lower."""
    lines = []
    for pixels in _pairs_of_rows(image):
        line = Text()
        for upper, lower in pixels.tolist():
            line.append(UPPER_HALF, f"{_style(upper)} on {_style(lower)}")
        lines.append(line)
    return Text("\n").join(lines)


def shades(image: Image.Image) -> str:
    """Draws where there are no colours: the darker a pixel, the fuller its character."""
    lines = []
    for pixels in _pairs_of_rows(image):
        darkness = 1 - pixels.mean(axis=(1, 2)) / 255  # [width]
        levels = (darkness * (len(SHADES) - 1)).round().astype(int)
        lines.append("".join(SHADES[level] for level in levels).rstrip())
    return "\n".join(lines)


def _pairs_of_rows(image: Image.Image) -> np.ndarray:
    """Gives [height / 2, width, 2, 3] uint8; a last row of an odd height is there twice."""
    pixels = np.asarray(image)
    pixels = np.pad(pixels, ((0, len(pixels) % 2), (0, 0), (0, 0)), mode="edge")
    return pixels.reshape(-1, 2, image.width, 3).transpose(0, 2, 1, 3)


def _style(pixel: list[int]) -> str:
    red, green, blue = pixel
    return f"#{red:02x}{green:02x}{blue:02x}"
