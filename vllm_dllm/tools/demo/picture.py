"""Draws the steps of a canvas as one SVG picture: one row per step, one column per position."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from rich.cells import cell_len, set_cell_size

from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.drawing import Step
from vllm_dllm.tools.demo.questions import Question

MAX_ROWS = 28  # the most steps in a picture
BAR_WIDTH = 90  # pixels, for the largest entropy in the picture
CELL_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 19, 14, 18  # pixels
PIXEL = 4  # a question's picture is drawn this many times larger
COLORS = {drawing.ACCEPTED: "#7ee787", drawing.OPEN: "#6e7681", drawing.FINISHED: "#ffffff"}
QUESTION, LABEL, BAR, BACKGROUND = "#79c0ff", "#8b949e", "#d29922", "#0d1117"
LEGEND = "green: accepted   grey: best guess   white: finished   bar: mean entropy, nats"


def save_picture(path: Path, question: Question, steps: Sequence[Step]) -> None:
    """Writes an SVG file of the question and the steps of one canvas, at most `MAX_ROWS` of them.
    `steps` must not be empty. Makes the file's folder."""
    widths = [cell_len(text) for text, _ in drawing.position_cells(steps[-1])]
    left = MARGIN + len("step 00  ") * CELL_WIDTH
    right = left + (sum(widths) + 2) * CELL_WIDTH
    width = right + BAR_WIDTH + 8 + len("0.000") * CELL_WIDTH + MARGIN
    width = max(width, len(LEGEND) * CELL_WIDTH + 2 * MARGIN)
    most_cells = int((width - 2 * MARGIN) / CELL_WIDTH)
    text = question.text
    if cell_len(text) > most_cells:
        text = set_cell_size(text, most_cells - 1) + "…"
    max_entropy_nats = max(step.entropy_nats for step in steps) or 1.0  # of a model that is sure
    y: float = MARGIN + FONT_SIZE
    parts = []
    if question.image is not None:
        size = tuple(PIXEL * length for length in question.image.size)
        parts.append(_svg_image(MARGIN, MARGIN, size, question.data_url))
        y += size[1] + LINE_HEIGHT / 2
    parts.append(_svg_text(MARGIN, y, text, QUESTION, "bold"))
    y += 1.5 * LINE_HEIGHT
    for step in select_evenly(steps, MAX_ROWS):
        parts.append(_svg_text(MARGIN, y, f"step {step.number:2d}", LABEL))
        parts += _svg_row(left, y, drawing.position_cells(step), widths)
        bar = step.entropy_nats / max_entropy_nats * BAR_WIDTH
        parts.append(_svg_rectangle(right, y - 10, max(bar, 1), 10, BAR))
        parts.append(_svg_text(right + BAR_WIDTH + 8, y, f"{step.entropy_nats:.3f}", LABEL))
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
        parts.append(_svg_text(x, y, text, COLORS[style], "" if style == drawing.OPEN else "bold"))
        x += cell_len(text) * CELL_WIDTH
    return parts


def _svg_text(x: float, y: float, text: str, color: str, weight: str = "") -> str:
    """Returns an SVG element for a text whose left end is at (`x`, `y`). It is bold if `weight` is
    not ""."""
    bold = ' font-weight="bold"' if weight else ""
    # The length is given because a fallback font may be wider or narrower. Plain spaces would be
    # dropped at the ends and in runs.
    content = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" textLength="{cell_len(text) * CELL_WIDTH:.1f}" '
        f'fill="{color}"{bold}>{content}</text>'
    )


def _svg_image(x: float, y: float, size: tuple[int, ...], url: str) -> str:
    """Returns an SVG element for the image of a data URL, scaled to `size`, without blurring its
    pixels."""
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{size[0]}" height="{size[1]}" '
        f'style="image-rendering: pixelated" href="{url}"/>'
    )


def _svg_rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Returns an SVG element for a filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )
