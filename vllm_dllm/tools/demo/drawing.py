"""Draws canvases and small pictures: in colours for a terminal, in plain text elsewhere, and the
steps of a canvas as one SVG picture, with one row per step and one column per position."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from vllm_dllm.tools.demo.questions import Question

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
        (docs/canvases.md). Raises KeyError if it lacks a field."""
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


MAX_ROWS = 28  # the most steps in a picture
BAR_WIDTH = 90  # pixels, for the largest entropy in the picture
BAR_GAP = 8  # pixels, from the bar to its number
CELL_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 19, 14, 18  # pixels
PIXEL = 4  # a question's picture is drawn this many times larger
COLORS = {ACCEPTED: "#7ee787", OPEN: "#6e7681", FINISHED: "#ffffff"}
QUESTION, LABEL, BAR, BACKGROUND = "#79c0ff", "#8b949e", "#d29922", "#0d1117"
LEGEND = "green: accepted   grey: best guess   white: finished   bar: mean entropy, nats"


def save_picture(path: Path, question: Question, steps: Sequence[Step]) -> None:
    """Writes an SVG file of the question and the steps of one canvas, at most `MAX_ROWS` of them.
    `steps` must not be empty. Makes the file's folder."""
    widths = [cell_len(text) for text, _ in position_cells(steps[-1])]
    left = MARGIN + len("step 00  ") * CELL_WIDTH
    right = left + (sum(widths) + 2) * CELL_WIDTH
    width = right + BAR_WIDTH + BAR_GAP + len("0.000") * CELL_WIDTH + MARGIN
    width = max(width, len(LEGEND) * CELL_WIDTH + 2 * MARGIN)
    parts, y = _svg_question(question, width)
    max_entropy_nats = max(step.entropy_nats for step in steps) or 1.0  # of a model that is sure
    for step in select_evenly(steps, MAX_ROWS):
        parts.append(_svg_text(MARGIN, y, f"step {step.number:2d}", LABEL))
        parts += _svg_row(left, y, position_cells(step), widths)
        bar = step.entropy_nats / max_entropy_nats * BAR_WIDTH
        parts.append(_svg_rectangle(right, y - 10, max(bar, 1), 10, BAR))
        parts.append(_svg_text(right + BAR_WIDTH + BAR_GAP, y, f"{step.entropy_nats:.3f}", LABEL))
        y += LINE_HEIGHT
    parts.append(_svg_text(MARGIN, y + LINE_HEIGHT / 2, LEGEND, LABEL))

    height = y + LINE_HEIGHT / 2 + MARGIN
    header = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="{FONT_SIZE}">'
    )
    background = _svg_rectangle(0, 0, width, height, BACKGROUND)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, background, *parts, "</svg>\n"]), encoding="utf-8")


def _svg_question(question: Question, width: float) -> tuple[list[str], float]:
    """Returns the elements of a question in a picture of `width` pixels, and the base line of the
    first row below them. A text that is too long is cut."""
    parts: list[str] = []
    y: float = MARGIN + FONT_SIZE
    if question.image is not None:
        image_width, image_height = (PIXEL * length for length in question.image.size)
        parts.append(
            f'<image x="{MARGIN:.1f}" y="{MARGIN:.1f}" width="{image_width}" '
            f'height="{image_height}" style="image-rendering: pixelated" '
            f'href="{question.data_url}"/>'
        )
        y += image_height + LINE_HEIGHT / 2
    most_cells = int((width - 2 * MARGIN) / CELL_WIDTH)
    text = question.text
    if cell_len(text) > most_cells:
        text = set_cell_size(text, most_cells - 1) + "…"
    parts.append(_svg_text(MARGIN, y, text, QUESTION, is_bold=True))
    return parts, y + 1.5 * LINE_HEIGHT


def select_evenly(steps: Sequence[Step], count: int) -> list[Step]:
    """Returns at most `count` of the steps, evenly spread, with the first and the last among them.
    `count` must be at least 2."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _svg_row(left: float, y: float, cells: list[tuple[str, str]], widths: list[int]) -> list[str]:
    """Returns the text elements of one step: one element for each run of cells of the same style.
    Each text is cut or padded to its entry of `widths`, in characters."""
    parts, x = [], left
    fitted = [
        (set_cell_size(text, width), style)
        for (text, style), width in zip(cells, widths, strict=True)
    ]
    for style, run in groupby(fitted, key=lambda cell: cell[1]):
        text = "".join(text for text, _ in run)
        parts.append(_svg_text(x, y, text, COLORS[style], is_bold=style != OPEN))
        x += cell_len(text) * CELL_WIDTH
    return parts


def _svg_text(x: float, y: float, text: str, color: str, is_bold: bool = False) -> str:
    """Returns an SVG element for a text whose left end is at (`x`, `y`)."""
    weight = ' font-weight="bold"' if is_bold else ""
    # The length is given because a fallback font may be wider or narrower. Plain spaces would be
    # dropped at the ends and in runs.
    content = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" textLength="{cell_len(text) * CELL_WIDTH:.1f}" '
        f'fill="{color}"{weight}>{content}</text>'
    )


def _svg_rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Returns an SVG element for a filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )
