"""`vllm-dllm demo`: starts a server, asks a few questions, and draws canvases while they denoise.

The demo streams answers over HTTP with the canvases in them (docs/canvases.md), like any client.
"""

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vllm_dllm.checkpoints import SHIPPED_CHECKPOINT, read_serving_note
from vllm_dllm.config.canvas_feeds import PLUGIN, PLUGINS_VARIABLE
from vllm_dllm.errors import InputError, ServerError
from vllm_dllm.requests.options import STREAM_CANVASES
from vllm_dllm.tools import server_process
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.drawing import Step, save_picture
from vllm_dllm.tools.demo.questions import Question, questions_for
from vllm_dllm.tools.server_process import HOST, Server
from vllm_dllm.tools.terminal import wait_on_console

__all__ = ["run"]

MOST_TOKENS = 256  # an answer that does not end would otherwise fill the whole context

OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "1G"),
    "--enforce-eager",  # compiling takes longer than the whole demo
)
"""The options that `make serve` gives to `vllm serve`, and --enforce-eager."""


def run(
    checkpoint: Path | None,  # None: the package's own
    ask: Sequence[str] | None,  # None: the demo's own questions
    port: int | None,
    pace: float,  # seconds that a step stays on the terminal, at least
    picture: Path | None,  # SVG file for the first answer
) -> None:
    """Serves `checkpoint`, asks the questions, draws the canvases, and stops the server.

    Raises:
        InputError: an option cannot be used.
        ServerError: the checkpoint is not complete, or the server failed.
    """
    if not 0 <= pace <= 5:
        raise InputError(f"--pace must be 0 to 5 seconds, got {pace:g}.")
    if picture is not None and picture.suffix != ".svg":
        raise InputError(f"--save-picture draws SVG files: name one FILE.svg, got '{picture}'.")
    checkpoint = checkpoint or SHIPPED_CHECKPOINT
    server_process.check_checkpoint(checkpoint)
    questions = [Question(text) for text in ask or ()] or questions_for(checkpoint)
    port = server_process.choose_port(port)
    view = View(Console(highlight=False), pace)

    command = server_process.serve_command(checkpoint, port, *OPTIONS)
    with (
        server_process.log_folder("demo") as logs,
        Server(command, port, logs / "server.log", _plugin_variables()) as server,
    ):
        try:
            view.wait_for_server(server, checkpoint)
            for question in questions:
                answer = Answer(question)
                view.show_answer(answer, _ask_in_thread(answer, server))
                if question is questions[0] and picture is not None and answer.steps:
                    first = [step for step in answer.steps if step.block == 0]
                    save_picture(picture, question, first)
                    view.print_note(f"Picture: {picture}")
        finally:
            view.print_note("\nStopping the server.")


def _plugin_variables() -> dict[str, str]:
    """Returns VLLM_PLUGINS for the server: the plugins that the user's own VLLM_PLUGINS names, and
    ours that shows canvases. Without the user's variable, other installed plugins are not
    loaded."""
    names = (*os.environ.get(PLUGINS_VARIABLE, "").split(","), PLUGIN)
    return {PLUGINS_VARIABLE: ",".join(dict.fromkeys(name for name in names if name))}


@dataclass
class Answer:
    """One question, and what has come of its answer so far."""

    question: Question
    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0  # from the request to the end of the answer
    steps: list[Step] = field(default_factory=list)

    def ask(self, port: int) -> Iterator[Step]:
        """Asks the server at `port`, and yields the steps as they come. Fills the other fields
        meanwhile, but not `steps`. Raises errors of the OpenAI client."""
        # trust_env: a proxy named in the environment has no business with our own server.
        with openai.OpenAI(
            base_url=f"http://{HOST}:{port}/v1",
            api_key="unused",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            model = client.models.list().data[0].id
            start = time.monotonic()
            stream = client.chat.completions.create(
                model=model,
                messages=[self.question.message],
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=MOST_TOKENS,
                seed=0,  # the same canvases in every demo
                extra_body={"vllm_xargs": {STREAM_CANVASES: True}},
            )
            for chunk in stream:
                if (canvas := getattr(chunk, "canvas", None)) is not None:
                    yield Step.from_event(canvas)
                for choice in chunk.choices:
                    self.text += choice.delta.content or ""
                if chunk.usage is not None:
                    self.num_tokens = chunk.usage.completion_tokens
            self.seconds = time.monotonic() - start


def _ask_in_thread(answer: Answer, server: Server) -> Iterator[Step]:
    """Asks a question, and yields the steps of its answer as they come. Appends them to
    `answer.steps`, too. A thread asks, so that drawing does not slow down the measured answer.

    Raises:
        ServerError: the request failed, or the server has ended.
    """
    items: queue.SimpleQueue[Step | Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        """Puts the steps into `items`, and after them None or the error that ended the answer."""
        try:
            for step in answer.ask(server.port):
                items.put(step)
            items.put(None)
        except Exception as error:  # nobody sees a thread's exceptions: the reader raises it
            items.put(error)

    threading.Thread(target=ask, daemon=True).start()
    while isinstance(item := items.get(), Step):
        answer.steps.append(item)
        yield item
    if item is not None:
        server.check_alive(server_process.ENDING_SECONDS)  # raises, if that was the reason
        raise ServerError(f"the server did not answer '{answer.question.text}': {item}") from item


class View:
    """Draws answers in place on a terminal. Elsewhere prints plain lines."""

    def __init__(self, console: Console, pace_s: float) -> None:
        self._console = console
        self._pace_s = pace_s
        self._live = console.is_terminal and not console.is_dumb_terminal

    def print_note(self, text: str) -> None:
        """Prints a line that is not part of an answer."""
        self._console.print(Text(text, "dim"), soft_wrap=True)

    def wait_for_server(self, server: Server, checkpoint: Path) -> None:
        """Waits until the server answers. Shows the seconds and the last line of its log, and then
        the checkpoint's note. Raises ServerError if the server ends."""
        self.print_note(f"Starting a server for {checkpoint} on port {server.port}.")
        self.print_note(f"Log: {server.log}")
        seconds = wait_on_console(server, self._console)
        self.print_note(f"Ready after {seconds:.0f} s.")
        if note := read_serving_note(checkpoint):
            self.print_note(note)

    def show_answer(self, answer: Answer, steps: Iterator[Step]) -> None:
        """Draws the steps as they come, then the answer and its speed. Returns when the answer is
        complete."""
        self._console.print()
        if (image := answer.question.image) is not None:
            if self._live and self._console.color_system and not self._console.no_color:
                picture = drawing.draw_in_colors(image)
                self._console.print(picture, no_wrap=True, overflow="crop")
            else:
                self._console.print(Text(drawing.draw_in_shades(image)), soft_wrap=True)
        self._console.print(Text(answer.question.text, "bold cyan"), soft_wrap=not self._live)
        if self._live:
            self._draw_in_place(steps)
        else:
            for step in steps:
                self._console.print(Text(drawing.format_line(step)), soft_wrap=True)
        answer_text = Text(drawing.without_controls(answer.text), "bold")
        self._console.print(answer_text, soft_wrap=not self._live)
        self.print_note(
            f"{_describe_steps(answer.steps)}{_pluralize(answer.num_tokens, 'token')} in "
            f"{answer.seconds:.2f} s: {answer.num_tokens / answer.seconds:.0f} tokens/s"
        )

    def _draw_in_place(self, steps: Iterator[Step]) -> None:
        """Draws each step in the place of the one before, and the finished canvases above it."""
        finished: list[str] = []
        with Live(console=self._console, auto_refresh=False) as live:
            for step in steps:
                frame = drawing.draw_frame(step, finished, self._console.width)
                live.update(frame, refresh=True)
                time.sleep(self._pace_s)
                if step.finished:
                    finished.append(drawing.without_controls("".join(step.texts)))


def _describe_steps(steps: Sequence[Step]) -> str:
    """Returns the beginning of the summary line, which ends with a space: the numbers of steps and
    canvases, or that there were none. The number of tokens follows it."""
    if not steps:
        return "No canvases: this model writes one token after the other. "
    num_canvases = sum(step.finished for step in steps)
    return f"{_pluralize(len(steps), 'step')} on {_pluralize(num_canvases, 'canvas', 'es')}, "


def _pluralize(number: int, what: str, plural: str = "s") -> str:
    """Returns a number and a noun, with the ending `plural` unless the number is 1."""
    return f"{number} {what}{plural if number != 1 else ''}"
