"""The whole command, with a stand-in for the server, and what it draws."""

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from checkpoints.recipes.tasks import Example
from tests.paths import CHECKPOINTS
from tests.processes import HANGS_S, is_running, wait_for
from tests.unit.tools.stub_server import stub_command, write_checkpoint
from vllm_dllm import cli
from vllm_dllm.tools import demo, server_process
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.drawing import Step, save_picture, select_evenly
from vllm_dllm.tools.demo.questions import (
    PICTURE_QUESTIONS,
    TEXT_QUESTIONS,
    Question,
    questions_for,
)
from vllm_dllm.tools.server_process import choose_port

RED, BLACK, GREY, WHITE = (255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)
PIXELS = Image.new("RGB", (2, 3))
PIXELS.putdata([RED, WHITE, BLACK, WHITE, GREY, WHITE])


def event(number: int, texts: list[str], accepted: list[int], entropy: float) -> dict[str, object]:
    """What a stream says of one step; an empty text stands for the end of the turn."""
    return {
        "block": 0,
        "step": number,
        "texts": texts,
        "accepted": accepted,
        "mean_entropy": entropy,
        "finished": all(accepted),
    }


RECORDED = [
    event(1, ["cat", "moon", "house", ""], [1, 0, 0, 1], 1.25),
    event(2, ["cat", " ", "sun", ""], [1, 1, 0, 1], 0.5),
    event(3, ["cat", " ", "dog", ""], [1, 1, 1, 1], 0.001),
]


def steps(*events: dict[str, object]) -> list[Step]:
    return [Step.from_event(canvas) for canvas in events]


@pytest.fixture
def with_picture(tmp_path: Path) -> Question:
    PIXELS.save(tmp_path / "shown.png")
    return Question("What number is shown?", tmp_path / "shown.png")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its server is the stub."""
    folder = write_checkpoint(tmp_path / "model", {})
    (folder / "steps.json").write_text(json.dumps(RECORDED))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # must not be asked
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_dllm")
    monkeypatch.setattr(server_process, "serve_command", stub_command)
    return folder


def asked(checkpoint: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (checkpoint / "asked.jsonl").read_text().splitlines()]


def test_whole_demo(checkpoint: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ask", "first?", "--ask", "second?", "--save-picture", f"{checkpoint}/c.svg"]
    assert cli.main(["demo", str(checkpoint), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("canvas 1  step  3  accepted   4/4") == 2
    assert re.findall(r"^(.*\?|cat|3 steps on 1 canvas, 2 tokens) *", out, re.M) == [
        *("first?", "cat", "3 steps on 1 canvas, 2 tokens"),
        *("second?", "cat", "3 steps on 1 canvas, 2 tokens"),
    ]
    for body in asked(checkpoint):
        assert body["vllm_xargs"] == {"diffusion_stream_canvases": True}
        assert body["plugins"] == "another,vllm_dllm,vllm_dllm_canvas"
    assert "cat" in (checkpoint / "c.svg").read_text()
    port = int(re.search(r"on port (\d+)", out).group(1))
    assert choose_port(port) == port  # nothing listens there any more
    assert not list(temporary.iterdir()), "logs of a good run"


def test_whole_demo_of_a_checkpoint_that_sees(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").write_text('{"vision_config": {}}')
    (checkpoint / "processor_config.json").write_text("{}")
    assert cli.main(["demo", str(checkpoint), "--save-picture", f"{checkpoint}/c.svg"]) == 0
    expected = [question.message["content"] for question in questions_for(checkpoint)]
    assert [body["messages"][0]["content"] for body in asked(checkpoint)] == expected
    assert drawing.draw_in_shades(PICTURE_QUESTIONS[0].image) in capsys.readouterr().out
    assert "<image" in (checkpoint / "c.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    forever = "import os, time; print(os.getpid(), flush=True); time.sleep(10**6)"
    script = (
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; from vllm_dllm import cli; from vllm_dllm.tools import server_process; "
        f"server_process.serve_command = lambda *given: [sys.executable, '-c', {forever!r}]; "
        f"sys.exit(cli.main(['demo', {str(tmp_path)!r}]))"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as running:
        wait_for(lambda: any(log.read_text() for log in tmp_path.glob("*/server.log")))
        (log,) = tmp_path.glob("*/server.log")
        wait_for(lambda: log.read_text().endswith("\n"))
        pid = int(log.read_text())
        running.send_signal(number)
        assert running.wait(HANGS_S) == 128 + number
    assert not is_running(pid) and not log.parent.exists()


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"

    def error(*arguments: str) -> str:
        assert cli.main(["demo", *arguments]) == 1
        return capsys.readouterr().err

    assert re.search(r"no folder '.*missing'.* `vllm-dllm checkpoint` prints", error(str(missing)))
    assert "has no config.json" in error(str(tmp_path))
    assert "name one FILE.svg" in error(str(tmp_path), "--save-picture", "canvas.png")
    assert "0 to 5 seconds, got -1" in error(str(tmp_path), "--pace", "-1")
    (tmp_path / "config.json").write_text("{}")
    assert "has no tokenizer.json" in error(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in error(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = error(str(tmp_path), "--port", port)
    assert re.search(rf"cannot listen on port {port} .* leave --port out", message)
    assert "cannot listen on port 70000" in error(str(tmp_path), "--port", "70000")


SORT = Question("Sort: [dog] cat")


def draw(console: Console, question: Question = SORT, text: str = "cat dog") -> None:
    recorded = steps(*RECORDED)
    answer = SimpleNamespace(
        question=question, text=text, steps=recorded, num_tokens=4, seconds=0.5
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


def test_a_terminal_does_not_obey_an_answer() -> None:
    for live in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=live, _environ={})
        draw(console, text="a\x1b]0;title\x07b\x9b2Jc")
        assert "a▒]0;title▒b▒2Jc" in out.getvalue()
    assert drawing.without_controls("é\t日\n\x1b") == "é\t日\n▒"


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


def colour_terminal(width: int, **environment: str) -> Console:
    return Console(
        file=io.StringIO(),
        highlight=False,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        _environ=environment,
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
    terminal = colour_terminal(72, NO_COLOR="1")
    draw(terminal, with_picture)
    assert terminal.file.getvalue().splitlines()[1:3] == ["▓", "▒"]


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "canvas.svg"
    save_picture(path, Question("Sort: <dog> & cat"), steps(*RECORDED))
    texts = [element.text for element in ElementTree.parse(path).iter() if element.text]
    words = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts]
    assert "Sort: <dog> & cat" in words
    assert [word for word in words if word.startswith("step")] == ["step  1", "step  2", "step  3"]
    # The guesses of the first step, in the widths of the finished text: "house" became "dog".
    assert words[words.index("step  1") + 1 :][:3] == ["cat", "mhou", "·"]
    assert "cat dog·" in words


def test_picture_of_a_question_about_a_picture(tmp_path: Path, with_picture: Question) -> None:
    path = tmp_path / "canvas.svg"
    heights = []
    for question in (Question(with_picture.text), with_picture):
        save_picture(path, question, steps(*RECORDED))
        root = ElementTree.parse(path).getroot()
        heights.append(float(root.attrib["viewBox"].split()[3]))
        shown = list(root.iter("{http://www.w3.org/2000/svg}image"))
        assert len(shown) == (question.picture is not None)
    (image,) = shown
    drawn = base64.b64decode(image.attrib["href"].partition("base64,")[2])
    assert Image.open(io.BytesIO(drawn)).size == PIXELS.size
    assert (int(image.attrib["width"]), int(image.attrib["height"])) == (8, 12)
    assert heights[1] - heights[0] > 12


def test_a_picture_of_a_model_that_is_sure(tmp_path: Path) -> None:
    sure = steps(*(step | {"mean_entropy": 0.0} for step in RECORDED))
    save_picture(tmp_path / "canvas.svg", Question("Sort: b a"), sure)
    assert "0.000" in (tmp_path / "canvas.svg").read_text()


def test_a_picture_shows_both_ends_of_many_steps() -> None:
    many = steps(*(RECORDED[0] | {"step": number} for number in range(1, 49)))
    numbers = [step.number for step in select_evenly(many, 28)]
    assert len(numbers) == 28 and numbers[0] == 1 and numbers[-1] == 48
    assert numbers == sorted(set(numbers))


def test_cells() -> None:
    first, second, third = steps(*RECORDED)
    assert drawing.position_cells(first) == [
        ("cat", drawing.ACCEPTED),
        ("moon", drawing.OPEN),
        ("house", drawing.OPEN),
        ("·", drawing.ACCEPTED),
    ]
    assert drawing.position_cells(second)[1:3] == [(" ", drawing.ACCEPTED), ("sun", drawing.OPEN)]
    assert {style for _, style in drawing.position_cells(third)} == {drawing.FINISHED}
    (odd,) = steps(event(1, ["\n", "\x07", "\ufffd", ""], [1, 1, 1, 1], 0.0))
    assert [text for text, _ in drawing.position_cells(odd)] == ["⏎", "▒", "▒", "·"]


def test_flow_breaks_between_cells() -> None:
    lines = drawing.wrap_cells([("cat", ""), (" ", ""), ("house", ""), ("·", ""), ("xy", "")], 6)
    assert [line.plain for line in lines] == ["cat ", "house·", "xy"]
    assert [line.plain for line in drawing.wrap_cells([("longer", ""), ("b", "")], 3)] == [
        "longer",
        "b",
    ]


@pytest.mark.parametrize(
    ("entropy_nats", "filled"), [(0.0, 0), (1e-6, 1), (1.75, 10), (7.0, 20), (9.0, 20)]
)
def test_entropy_bar(entropy_nats: float, filled: int) -> None:
    assert drawing.entropy_bar(entropy_nats) == "█" * filled + "░" * (20 - filled)


def test_the_questions_are_held_out() -> None:
    assert 4 <= len(TEXT_QUESTIONS) <= 6
    assert all(Example("", question.text, "").held_out for question in TEXT_QUESTIONS)
    rows = (CHECKPOINTS / "held_out_images.jsonl").read_text().splitlines()
    held_out = [json.loads(row)["messages"][0]["content"] for row in rows]
    assert all(question.message["content"] in held_out for question in PICTURE_QUESTIONS)


def test_pictures_are_for_checkpoints_that_see(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vision_config": {"model_type": "gemma4_vision"}}')
    assert list(questions_for(tmp_path)) == list(TEXT_QUESTIONS)  # nothing makes patches
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert list(questions_for(tmp_path)) == [*PICTURE_QUESTIONS, *TEXT_QUESTIONS]
    config.write_text('{"vision_config": null}')
    assert list(questions_for(tmp_path)) == list(TEXT_QUESTIONS)
