"""The demo without vLLM: what it draws, how it reads a growing trace, how it treats its server."""

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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console

from tests.paths import CHECKPOINTS
from tests.processes import HANGS_S, is_running, wait_for
from vllm_dllm import cli
from vllm_dllm.tools import demo
from vllm_dllm.tools.demo import drawing, picture, pixels
from vllm_dllm.tools.demo.questions import (
    PICTURE_QUESTIONS,
    TEXT_QUESTIONS,
    Question,
    questions_for,
)
from vllm_dllm.tools.demo.steps import Step, StepReader
from vllm_dllm.tools.pretrain.tasks import Example
from vllm_dllm.tools.pretrain.tokenizer import EOS_ID, PAD_ID, build_tokenizer
from vllm_dllm.tools.server_process import choose_port

TOKENIZER = build_tokenizer()
TEXTS = drawing.TokenTexts(TOKENIZER.backend_tokenizer)

# Acts as a vLLM server with one model: /health, /v1/models and an answer in one streamed piece,
# after the steps of the request have been appended to the trace.
STUB = r"""
import http.server, json, os, sys
port, trace, steps = int(sys.argv[1]), sys.argv[2], json.load(open(sys.argv[3]))

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, *pieces, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece.encode())
    def do_GET(self):
        model = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
        self.reply(json.dumps({"object": "list", "data": [model]}))
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[3] + ".asked", "ab") as file:
            file.write(body + b"\n")
        name = f"chatcmpl-{self.headers['X-Request-Id']}-0a1b2c3d"
        with open(trace, "a") as file:
            for step in steps:
                file.write(json.dumps(step | {"request_id": name}) + "\n")
        if not steps:
            print("out of memory", flush=True)
            os._exit(9)
        chunk = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": "stub"}
        delta = {"index": 0, "delta": {"content": "cat"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        pieces = [chunk | {"choices": [delta]}, chunk | {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
        self.reply(*lines, "data: [DONE]\n\n", kind="text/event-stream")

print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text, add_special_tokens=False)
    return token_id


def step_fields(
    number: int, guess: list[str], accepted: list[int], canvas: list[str], entropy: float
) -> dict[str, object]:
    """One line of the trace; an empty text stands for the end of the turn."""
    return {
        "request_id": "chatcmpl-demo-1-0a1b2c3d",
        "step": number,
        "tokens": [token(text) if text else EOS_ID for text in guess],
        "accepted": accepted,
        "canvas": [token(text) if text else EOS_ID for text in canvas],
        "entropy": entropy,
        "finished": all(accepted),
    }


RECORDED = [
    step_fields(1, ["cat", " ", "house", ""], [1, 0, 0, 1], ["cat", "moon", "sun", ""], 1.25),
    step_fields(2, ["cat", " ", "dog", ""], [1, 1, 0, 1], ["cat", " ", "x", ""], 0.5),
    step_fields(3, ["cat", " ", "dog", ""], [1, 1, 1, 1], ["cat", " ", "dog", ""], 0.001),
]


def steps(*lines: dict[str, object]) -> list[Step]:
    return [Step.from_line(json.dumps(line).encode()) for line in lines]


# --- reading -------------------------------------------------------------------------------------


def test_reads_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "canvases.jsonl"
    reader = StepReader(path)
    assert reader.read() == []  # not there yet
    first, second, third = (json.dumps(line) + "\n" for line in RECORDED)
    with path.open("a", buffering=1) as file:
        file.write(first + second[:30])
        file.flush()
        assert [step.number for step in reader.read()] == [1]
        assert reader.read() == []  # the second line is half written
        file.write(second[30:] + third)
        assert [step.number for step in reader.read()] == [2, 3]
        assert reader.read() == []


# --- drawing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_id", "text"),
    [
        pytest.param(token("house"), "house", id="word"),
        pytest.param(token(" "), " ", id="space"),
        pytest.param(token("\n"), "⏎", id="newline"),
        pytest.param(token("\x07"), "▒", id="control"),
        pytest.param(TOKENIZER.encode("é", add_special_tokens=False)[0], "▒", id="half-character"),
        pytest.param(PAD_ID, "·", id="pad"),
        pytest.param(len(TOKENIZER) - 1, "·", id="unused"),
    ],
)
def test_token_texts(token_id: int, text: str) -> None:
    assert TEXTS[token_id] == text


def test_cells_keep_their_places() -> None:
    first, second, third = steps(*RECORDED)
    # Noise is cut or padded to the width of what will probably stand there.
    assert drawing.cells(first, TEXTS) == [
        ("cat", drawing.ACCEPTED),
        ("m", drawing.NOISE),
        ("sun  ", drawing.NOISE),
        ("·", drawing.ACCEPTED),
    ]
    assert drawing.cells(second, TEXTS)[1:3] == [(" ", drawing.ACCEPTED), ("x  ", drawing.NOISE)]
    assert {style for _, style in drawing.cells(third, TEXTS)} == {drawing.COMMITTED}


def test_flow_breaks_between_cells() -> None:
    lines = drawing.flow([("cat", ""), (" ", ""), ("house", ""), ("·", ""), ("xy", "")], 6)
    assert [line.plain for line in lines] == ["cat ", "house·", "xy"]
    assert [line.plain for line in drawing.flow([("longer", ""), ("b", "")], 3)] == ["longer", "b"]


@pytest.mark.parametrize(
    ("entropy_nats", "filled"), [(0.0, 0), (1e-6, 1), (0.25, 10), (1.0, 20), (7.0, 20)]
)
def test_entropy_bar(entropy_nats: float, filled: int) -> None:
    bar = drawing.entropy_bar(entropy_nats, max_entropy_nats=1.0)
    assert bar == "█" * filled + "░" * (20 - filled)


SORT = Question("Sort: [dog] cat")


def draw(console: Console, question: Question = SORT) -> None:
    recorded = steps(*RECORDED)
    answer = SimpleNamespace(
        question=question, text="cat dog", steps=recorded, num_tokens=4, seconds=0.5
    )
    demo.View(console, TEXTS, pace_s=0).show(answer, iter(recorded))


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
    assert "sun" in out.getvalue()  # the noise of the first step was drawn,
    assert "sun" not in "".join(screen)  # and overwritten
    assert [line for line in screen if "step" in line] == [
        "canvas 1  step  3  accepted   4/4  entropy  0.001 █░░░░░░░░░░░░░░░░░░░  committed"[:71]
        + "…",
        "3 steps on 1 canvas, 4 tokens in 0.50 s: 8 tokens/s",
    ]
    assert sum("cat dog·" in line for line in screen) == 1


RED, BLACK, GREY, WHITE = (255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)
PIXELS = Image.new("RGB", (2, 3))
PIXELS.putdata([RED, WHITE, BLACK, WHITE, GREY, WHITE])


@pytest.fixture
def with_picture(tmp_path: Path) -> Question:
    PIXELS.save(tmp_path / "shown.png")
    return Question("What number is shown?", tmp_path / "shown.png")


def test_half_blocks() -> None:
    drawn = pixels.half_blocks(PIXELS)
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


def test_a_picture_wider_than_the_terminal_is_cut(tmp_path: Path) -> None:
    Image.new("RGB", (60, 4)).save(tmp_path / "wide.png")
    console = colour_terminal(20)
    draw(console, Question("What is it?", tmp_path / "wide.png"))
    lines = console.file.getvalue().splitlines()
    assert [line.count("▀") for line in lines[1:4]] == [20, 20, 0]


def test_a_picture_where_there_are_no_colours(with_picture: Question) -> None:
    assert pixels.shades(PIXELS) == "▓\n▒"
    out = io.StringIO()
    draw(Console(file=out, highlight=False, width=72), with_picture)
    assert out.getvalue().splitlines()[1:4] == ["▓", "▒", "What number is shown?"]


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = io.StringIO()
    draw(Console(file=out, width=200, force_terminal=True, _environ={"TERM": "dumb"}))
    assert sum("canvas 1  step" in line for line in out.getvalue().splitlines()) == 3


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "canvas.svg"
    picture.save(path, Question("Sort: <dog> & cat"), steps(*RECORDED), TEXTS)
    texts = [element.text for element in ElementTree.parse(path).iter() if element.text]
    words = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts]
    assert "Sort: <dog> & cat" in words
    assert [word for word in words if word.startswith("step")] == ["step  1", "step  2", "step  3"]
    # The noise of the first step, in the widths of the finished text: "house" has become "dog".
    assert words[words.index("step  1") + 1 :][:3] == ["cat", "msun", "·"]
    assert "cat dog·" in words


def test_picture_of_a_question_about_a_picture(tmp_path: Path, with_picture: Question) -> None:
    path = tmp_path / "canvas.svg"
    heights = []
    for question in (Question(with_picture.text), with_picture):
        picture.save(path, question, steps(*RECORDED), TEXTS)
        root = ElementTree.parse(path).getroot()
        heights.append(float(root.attrib["viewBox"].split()[3]))
        shown = list(root.iter("{http://www.w3.org/2000/svg}image"))
        assert len(shown) == (question.picture is not None)
    (image,) = shown
    drawn = base64.b64decode(image.attrib["href"].partition("base64,")[2])
    assert Image.open(io.BytesIO(drawn)).size == PIXELS.size
    assert (int(image.attrib["width"]), int(image.attrib["height"])) == (8, 12)
    assert heights[1] - heights[0] > 12


def test_a_long_question_does_not_widen_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "canvas.svg"
    picture.save(path, Question("Sort: " + "b a " * 200), steps(*RECORDED), TEXTS)
    root = ElementTree.parse(path).getroot()
    width = float(root.attrib["viewBox"].split()[2])
    ends = [
        float(text.attrib["x"]) + float(text.attrib["textLength"])
        for text in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert 0.9 * width < max(ends) < width


def test_a_picture_shows_both_ends_of_many_steps() -> None:
    many = steps(*(RECORDED[0] | {"step": number} for number in range(1, 49)))
    numbers = [step.number for step in picture.spread(many, 28)]
    assert len(numbers) == 28 and numbers[0] == 1 and numbers[-1] == 48
    assert numbers == sorted(set(numbers))


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[dict[str, object]]], Path]:
    """Makes the demo start the stub server, which writes the given steps; returns a checkpoint."""
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # must not be asked
    monkeypatch.setattr(demo.signal, "signal", lambda *given: None)  # pytest keeps its handlers

    def prepare(lines: list[dict[str, object]]) -> Path:
        (tmp_path / "steps.json").write_text(json.dumps(lines))

        def command(checkpoint: Path, port: int, *options: str) -> list[str]:
            config = json.loads(options[options.index("--additional-config") + 1])
            trace = config["vllm_dllm"]["trace_path"]
            arguments = [str(port), trace, str(tmp_path / "steps.json")]
            return [sys.executable, "-c", STUB, *arguments]

        monkeypatch.setattr(demo, "serve_command", command)
        return tmp_path

    return prepare


def test_whole_demo(stub: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = stub(RECORDED)
    arguments = ["--ask", "first?", "--ask", "second?", "--save-picture", f"{checkpoint}/c.svg"]
    assert cli.main(["demo", str(checkpoint), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("canvas 1  step  3  accepted   4/4") == 2
    assert re.findall(r"^(.*\?|cat|3 steps on 1 canvas, 2 tokens) *", out, re.M) == [
        *("first?", "cat", "3 steps on 1 canvas, 2 tokens"),
        *("second?", "cat", "3 steps on 1 canvas, 2 tokens"),
    ]
    assert "cat" in (checkpoint / "c.svg").read_text()
    port = int(re.search(r"on port (\d+)", out).group(1))
    assert choose_port(port) == port  # nothing listens there any more


def test_whole_demo_of_a_checkpoint_that_sees(
    stub: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = stub(RECORDED)
    (checkpoint / "config.json").write_text('{"vision_config": {}}')
    (checkpoint / "processor_config.json").write_text("{}")
    assert cli.main(["demo", str(checkpoint), "--save-picture", f"{checkpoint}/c.svg"]) == 0
    asked = (checkpoint / "steps.json.asked").read_text().splitlines()
    expected = [question.message["content"] for question in questions_for(checkpoint)]
    assert [json.loads(body)["messages"][0]["content"] for body in asked] == expected
    assert pixels.shades(PICTURE_QUESTIONS[0].image) in capsys.readouterr().out
    assert "<image" in (checkpoint / "c.svg").read_text()


def test_a_server_that_dies_while_it_answers(
    stub: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", str(stub([])), "--ask", "well?"]) == 1
    assert re.search(
        r"(?s)the server ended \(9\).*server.log.*out of memory", capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server(tmp_path: Path, number: signal.Signals) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    forever = "import os, time; print(os.getpid(), flush=True); time.sleep(10**6)"
    script = (
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import sys; from vllm_dllm import cli; from vllm_dllm.tools import demo; "
        f"demo.serve_command = lambda *given: [sys.executable, '-c', {forever!r}]; "
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
    assert not is_running(pid)


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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = error(str(tmp_path), "--port", port)
    assert re.search(rf"cannot listen on port {port} .* leave --port out", message)
    assert "cannot listen on port 70000" in error(str(tmp_path), "--port", "70000")


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
