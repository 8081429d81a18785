"""What the demo shows in a terminal, and in a pipe."""

import io
import re
from types import SimpleNamespace

from rich.console import Console

from tests.unit.tools.demo.recorded import PIXELS, RECORDED, steps
from vllm_dllm.tools import demo
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.questions import Question

SORT = Question("Sort: [dog] cat")


def draw(console: Console, question: Question = SORT) -> None:
    recorded = steps(*RECORDED)
    answer = SimpleNamespace(
        question=question, text="cat dog", steps=recorded, num_tokens=4, seconds=0.5
    )
    demo.View(console, pace_s=0).show_answer(answer, iter(recorded))


def test_plain_lines_when_piped() -> None:
    out = io.StringIO()
    draw(Console(file=out, highlight=False, width=40))  # narrower than the lines
    assert out.getvalue().splitlines() == [
        "",
        "Sort: [dog] cat",
        "canvas 1  step  1  accepted   2/4  entropy  1.250  cat░░",
        "canvas 1  step  2  accepted   3/4  entropy  0.500  cat ░",
        "canvas 1  step  3  accepted   4/4  entropy  0.001  cat dog",
        "cat dog",
        "3 steps on 1 canvas, 4 tokens in 0.50 s: 8 tokens/s",
    ]


def test_a_model_without_canvases_is_called_one() -> None:
    out = io.StringIO()
    answer = SimpleNamespace(question=SORT, text="cat", steps=[], num_tokens=1, seconds=0.5)
    demo.View(Console(file=out, width=100), pace_s=0).show_answer(answer, iter([]))
    assert out.getvalue().splitlines()[-1] == (
        "No canvases: this model writes one token after the other. 1 token in 0.50 s: 2 tokens/s"
    )


def on_screen(output: str) -> list[str]:
    """What a terminal shows in the end: follows line feeds, cursor-up and erase-line."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b") and part.endswith("A"):
            row -= int(part[2:-1])
        elif part.startswith("\x1b") and part.endswith("2K"):
            lines[row] = ""
        elif part and not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_redrawn_in_place_on_a_terminal() -> None:
    out = io.StringIO()
    draw(Console(file=out, highlight=False, width=72, force_terminal=True, _environ={}))
    screen = on_screen(out.getvalue())
    assert "sun" in out.getvalue()  # the guess of the second step was drawn,
    assert "sun" not in "".join(screen)  # and overwritten
    assert [line for line in screen if "step" in line] == [
        "canvas 1  step  3  accepted   4/4  entropy  0.001 █░░░░░░░░░░░░░░░░░░░  finished"[:71]
        + "…",
        "3 steps on 1 canvas, 4 tokens in 0.50 s: 8 tokens/s",
    ]
    assert sum("cat dog·" in line for line in screen) == 1


def test_half_blocks() -> None:
    drawn = drawing.draw_in_colors(PIXELS)
    assert drawn.plain == "▀▀\n▀▀"
    assert [str(span.style) for span in drawn.spans] == [
        *("#ff0000 on #000000", "#ffffff on #ffffff"),
        *("#808080 on #808080", "#ffffff on #ffffff"),  # the last row, twice
    ]


def colour_terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(),
        highlight=False,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )


def test_a_picture_on_a_terminal(with_picture: Question) -> None:
    """Above the question. rich makes of the colours what the terminal has."""
    console = colour_terminal(72)
    draw(console, with_picture)
    first, second, third = console.file.getvalue().splitlines()[1:4]
    assert "\x1b[38;2;255;0;0;48;2;0;0;0m▀\x1b[0m" in first
    assert second.count("▀") == 2
    assert "What number is shown?" in third


def test_a_picture_where_there_are_no_colours(with_picture: Question) -> None:
    assert drawing.draw_in_shades(PIXELS) == "▓\n▒"
    out = io.StringIO()
    draw(Console(file=out, highlight=False, width=72), with_picture)
    assert out.getvalue().splitlines()[1:4] == ["▓", "▒", "What number is shown?"]
