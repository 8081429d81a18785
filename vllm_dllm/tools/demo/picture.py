"""Draws the steps of a canvas as one SVG picture: one row per step, one column per position."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from rich.cells import cell_len, set_cell_size

from vllm_dllm.tools.demo.drawing import ACCEPTED, FINISHED, OPEN, Step, position_cells
from vllm_dllm.tools.demo.questions import Question

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
