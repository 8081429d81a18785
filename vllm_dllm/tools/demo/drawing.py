"""Draws canvases and small pictures: in colours for a terminal, in plain text elsewhere."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

ACCEPTED, OPEN, FINISHED = "bold green", "dim", "bold"
END = "·"  # a special token: past the end of the answer there is little else
UNREADABLE = "▒"  # part of a character, or a control character
HIDDEN = "░"  # a position that is not accepted, where text cannot be dim
BAR_CELLS = 20
FULL_BAR_NATS = 7.0  # the entropy of a thousand tokens that are equally likely
WIDEST_FRAME = 100  # cells
UPPER_HALF = "▀"  # a character shows two pixels of a picture, one above the other
SHADES = " ░▒▓█"  # from paper to ink


@dataclass(frozen=True)
class Step:
    """One denoise step of one canvas. Lists have one entry for each position of the canvas."""

    block: int  # index of the canvas in the answer, from 0
    number: int  # of the step in its canvas, from 1
    texts: list[str]  # texts of the best guesses; "" for special tokens
    accepted: list[bool]  # whether the step accepted the best guess
    entropy_nats: float  # mean over the positions of the canvas
    finished: bool  # whether the best guesses become the answer's block

    @classmethod
    def from_event(cls, canvas: Mapping[str, Any]) -> "Step":
        """Returns the step that an event in the stream of an answer describes
        (docs/canvases.md)."""
        return cls(
            block=canvas["block"],
            number=canvas["step"],
            texts=canvas["texts"],
            accepted=[bool(flag) for flag in canvas["accepted"]],
            entropy_nats=canvas["mean_entropy"],
            finished=canvas["finished"],
        )


def position_cells(step: Step) -> list[tuple[str, str]]:
    """Returns (text, style) of each position of the canvas. The text is the best guess, and the
    style tells whether it is accepted or the canvas finished."""
    return [
        (_printable(text), FINISHED if step.finished else ACCEPTED if accepted else OPEN)
        for text, accepted in zip(step.texts, step.accepted, strict=True)
    ]


def _printable(text: str) -> str:
    """Returns a token's text, in which visible signs replace line breaks and unprintable
    characters. `END` replaces an empty text."""
    text = text.replace("\n", "⏎").replace("\t", " ")
    # Marks, controls, surrogates and unassigned characters have no cell of their own.
    shown = "".join(
        UNREADABLE if c == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(c)[0] in "MC" else c
        for c in text
    )
    return shown or END


def without_controls(text: str) -> str:
    """Returns a text in which `UNREADABLE` replaces control characters, which a terminal would
    obey, but not line breaks and tabs."""
    return "".join(
        UNREADABLE if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


def wrap_cells(cells: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Returns lines of at most `width` terminal columns with the (text, style) pairs `cells`. No
    pair is split: one that is wider has a line of its own."""
    lines, used = [Text(no_wrap=True)], 0
    for text, style in cells:
        size = cell_len(text)
        if used + size > width and used > 0:
            lines.append(Text(no_wrap=True))
            used = 0
        lines[-1].append(text, style)
        used += size
    return lines


def entropy_bar(entropy_nats: float) -> str:
    """Returns a bar of `BAR_CELLS` characters, whose filled part is the square root of the share of
    `FULL_BAR_NATS`. Most steps are below a tenth of that, which the root makes visible."""
    share = math.sqrt(min(max(entropy_nats / FULL_BAR_NATS, 0.0), 1.0))
    filled = math.ceil(share * BAR_CELLS)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def draw_frame(step: Step, before: Sequence[str], width: int) -> Group:
    """Returns one step as drawn on a terminal of `width` columns: the earlier blocks `before`, the
    step's numbers, and the canvas."""
    width = min(width, WIDEST_FRAME)
    status = Text(no_wrap=True, overflow="ellipsis")
    status.append(_counters(step))
    status.append(entropy_bar(step.entropy_nats), "cyan")
    status.append("  finished" if step.finished else "", FINISHED)
    inside = max(width - 4, 1)  # the panel's border and padding
    canvas = Panel(Group(*wrap_cells(position_cells(step), inside)), width=width)
    return Group(*(Text(block, FINISHED) for block in before), status, canvas)


def format_line(step: Step) -> str:
    """Returns one step as a line of plain text. A mark hides positions that are not accepted."""
    texts = [HIDDEN if style == OPEN else text for text, style in position_cells(step)]
    return f"{_counters(step)} {''.join(texts).rstrip(END)}"


def _counters(step: Step) -> str:
    """Returns the numbers of a step as text of a fixed width."""
    return (
        f"canvas {step.block + 1}  step {step.number:2d}  "
        f"accepted {sum(step.accepted):3d}/{len(step.accepted)}  "
        f"entropy {step.entropy_nats:6.3f} "
    )


def draw_in_colors(image: Image.Image) -> Text:
    """Returns an RGB image as coloured text. The foreground of a character is the upper one of two
    pixels, the background the lower one."""
    lines = []
    for pixels in _pairs_of_rows(image):
        line = Text()
        for upper, lower in pixels.tolist():
            line.append(UPPER_HALF, f"{_color(upper)} on {_color(lower)}")
        lines.append(line)
    return Text("\n").join(lines)


def draw_in_shades(image: Image.Image) -> str:
    """Returns an RGB image as text without colours. The darker two pixels are, the fuller is their
    character."""
    lines = []
    for pixels in _pairs_of_rows(image):
        darkness = 1 - pixels.mean(axis=(1, 2)) / 255  # [width]
        levels = (darkness * (len(SHADES) - 1)).round().astype(int)
        lines.append("".join(SHADES[level] for level in levels).rstrip())
    return "\n".join(lines)


def _pairs_of_rows(image: Image.Image) -> np.ndarray:
    """Returns the pixels of an RGB image as [height / 2, width, 2, 3] uint8. If the height is odd,
    the last row comes twice."""
    pixels = np.asarray(image)
    pixels = np.pad(pixels, ((0, len(pixels) % 2), (0, 0), (0, 0)), mode="edge")
    return pixels.reshape(-1, 2, image.width, 3).transpose(0, 2, 1, 3)


def _color(pixel: list[int]) -> str:
    """Returns red, green and blue, from 0 to 255, as `#rrggbb`."""
    red, green, blue = pixel
    return f"#{red:02x}{green:02x}{blue:02x}"
