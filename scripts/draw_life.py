"""Draws docs/life.svg: the life of a request, with the files and functions it passes through.

python scripts/draw_life.py
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1080, 900
LANE_WIDTH, LANE_GAP, LEFT = 324, 42, 12  # px
TOP, ROW = 70, 94  # of the first box; from one to the next
INK, SOFT, PAPER = "#24303a", "#5d6b76", "#ffffff"
CAUSAL, BIDIRECTIONAL = "#4c78a8", "#f58518"
LANES = (
    ("API server process", "#eef2f6"),
    ("Engine process", "#eaf3ec"),
    ("Worker process, one per GPU", "#fbf1e6"),
)
API, ENGINE, WORKER = range(3)


class Box(NamedTuple):
    """A step of a request's life, and the code that does it."""

    lane: int
    row: float
    title: str
    code: tuple[str, ...] = ()  # "file: function, function", in vllm_dllm/ unless it says otherwise


BOXES = {
    "check": Box(
        API,
        0,
        "The request is checked, or refused with 400",
        ("requests/admission.py: admit", "requests/options.py: parse_keys"),
    ),
    "queue": Box(
        ENGINE,
        0,
        "It joins the queue, its canvas fitted",
        ("scheduling/scheduler.py: add_request", "requests/options.py: narrowing, store_in"),
    ),
    "schedule": Box(
        ENGINE,
        1,
        "A step is put together",
        ("scheduling/scheduler.py: complete_output", "scheduling/families.py: canvas_width"),
    ),
    "slot": Box(
        WORKER,
        1,
        "If new: a slot, and a random canvas",
        ("step/requests.py: add_request", "step/slots.py: CanvasSlots"),
    ),
    "embed": Box(
        WORKER,
        2,
        "Embed all rows, self-condition canvases",
        ("step/uniform/uniform_step.py: condition", "models/diffusion_gemma.py: SelfConditioning"),
    ),
    "flags": Box(
        WORKER,
        3,
        "Causal flags and window rules",
        ("step/runner/model_state.py: prepare_attn", "step/runner/attn_requests.py: build"),
    ),
    "forward": Box(
        WORKER,
        4,
        "The forward",
        (
            "models/diffusion_gemma.py: forward",
            "attention/gpu.py, cpu/attention/backend.py: forward",
        ),
    ),
    "read": Box(
        WORKER,
        5,
        "Logits become statistics and an embedding",
        ("step/logits/canvas_logits.py: read", "denoise/row_stats.py: row_stats"),
    ),
    "denoise": Box(
        WORKER,
        6,
        "Accept, renoise, judge",
        ("denoise/step.py: denoise_step", "denoise/rules.py: is_confident"),
    ),
    "settle": Box(
        WORKER,
        7,
        "Both outcomes are computed, one is written",
        ("step/canvas_stages.py: settle, write_slots", "requests/ends.py: is_last_block"),
    ),
    "arrive": Box(
        ENGINE,
        7,
        "A block arrives, or nothing",
        ("compat/scheduler.py: update_from_output",),
    ),
    "next": Box(
        ENGINE,
        4.4,
        "The next step: same canvas, or the next one",
        ("scheduling/scheduler.py: block_emitted", "scheduling/scheduler.py: output_counted"),
    ),
    "piece": Box(API, 7, "The client gets a piece of the answer"),
    "stop": Box(
        ENGINE,
        8,
        "Or the end: the last block is not committed",
        ("scheduling/scheduler.py: request_stopped",),
    ),
}
ARROWS = (
    ("check", "queue"),
    ("queue", "schedule"),
    ("schedule", "slot"),
    ("slot", "embed"),
    ("embed", "flags"),
    ("flags", "forward"),
    ("forward", "read"),
    ("read", "denoise"),
    ("denoise", "settle"),
    ("settle", "arrive"),
    ("arrive", "next"),
    ("next", "schedule"),
    ("arrive", "piece"),
    ("arrive", "stop"),
)


def left(box: Box) -> float:
    """Returns the x of a box, in px."""
    return LEFT + box.lane * (LANE_WIDTH + LANE_GAP)


def top(box: Box) -> float:
    """Returns the y of a box, in px."""
    return TOP + box.row * ROW


def height(box: Box) -> float:
    """Returns the height of a box, in px."""
    return 32 + 16 * len(box.code)


def draw_text(x: float, y: float, words: str, size: float, color: str = INK, **style: str) -> str:
    """Returns an SVG text."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    start = f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{attributes}>'
    return f"{start}{escape(words)}</text>"


def draw_lane(number: int) -> list[str]:
    """Returns the background of a process, with its name."""
    name, color = LANES[number]
    x = LEFT - 8 + number * (LANE_WIDTH + LANE_GAP)
    return [
        f'<rect x="{x}" y="8" width="{LANE_WIDTH + 16}" height="{HEIGHT - 16}" rx="8" '
        f'fill="{color}"/>',
        draw_text(x + 12, 38, name, 17, font_weight="bold"),
    ]


def draw_box(box: Box) -> list[str]:
    """Returns a box with its title and code."""
    x, y = left(box), top(box)
    lines = [
        f'<rect x="{x}" y="{y}" width="{LANE_WIDTH}" height="{height(box)}" rx="6" '
        f'fill="{PAPER}" stroke="#b9c4cd"/>',
        draw_text(x + 10, y + 21, box.title, 14, font_weight="bold"),
    ]
    lines += [
        draw_text(x + 10, y + 40 + 16 * i, code, 11.5, SOFT, font_family="monospace")
        for i, code in enumerate(box.code)
    ]
    return lines


def draw_arrow(start: Box, end: Box) -> str:
    """Returns an arrow between two boxes, horizontal between lanes and vertical within one."""
    if start.lane == end.lane:
        x = left(start) + LANE_WIDTH / 2
        ends = (top(start) + height(start), top(end) - 3)
        if end.row < start.row:
            ends = (top(start), top(end) + height(end) + 3)
        path = f"M{x} {ends[0]}V{ends[1]}"
    else:
        y = top(start) + 24
        ends = (left(start) + LANE_WIDTH, left(end) - 3)
        if end.lane < start.lane:
            ends = (left(start), left(end) + LANE_WIDTH + 3)
        path = f"M{ends[0]} {y}H{ends[1]}"
    return (
        f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.6" marker-end="url(#tip)"/>'
    )


def draw_forward_rows(x: float, y: float) -> list[str]:
    """Returns the inset that shows the rows of one forward: a bar for each of three requests."""
    lines = [draw_text(x, y, "What one forward holds", 14, font_weight="bold")]
    requests = (  # and their causal rows, in px
        ("a new request: its prompt, and its first canvas", 110),
        ("a canvas that is being denoised", 0),
        ("a finished block being committed, and its successor", 92),
    )
    for i, (words, causal) in enumerate(requests):
        bar = y + 24 + 56 * i
        lines.append(draw_text(x, bar + 4, words, 12, SOFT))
        for start, width, color in ((0, causal, CAUSAL), (causal, 92, BIDIRECTIONAL)):
            lines.append(
                f'<rect x="{x + start}" y="{bar + 12}" width="{width}" height="16" fill="{color}"/>'
            )
    legend = (
        ("causal: sees what comes before it", CAUSAL),
        ("bidirectional: also sees its whole canvas", BIDIRECTIONAL),
    )
    for i, (words, color) in enumerate(legend):
        line = y + 204 + 22 * i
        lines.append(f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{color}"/>')
        lines.append(draw_text(x + 20, line, words, 12, SOFT))
    return lines


def draw(path: Path) -> None:
    """Writes the figure to `path`."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>The life of a request</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>',
    ]
    for number in range(len(LANES)):
        lines += draw_lane(number)
    lines += draw_forward_rows(left(BOXES["check"]) + 4, TOP + 1.6 * ROW)
    lines += [draw_arrow(BOXES[start], BOXES[end]) for start, end in ARROWS]
    for box in BOXES.values():
        lines += draw_box(box)
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    draw(Path(__file__).parents[1] / "docs" / "life.svg")
