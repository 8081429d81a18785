"""Sends drawn requests to a server, some at a time, and checks every answer."""

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.faults.answers import Broken, check
from tests.faults.drawn_images import made
from tests.faults.drawn_requests import DrawnRequest, Model, requests
from tests.pictures import data_url
from tests.server.conftest import CANVAS, CHECKPOINT, MAX_MODEL_LEN, UNCOMPILED, start_serving, stop
from tests.server.process_trees import peak_memory
from tests.server.test_drafter import DRAFTER as DRAFTER_CHECKPOINT
from tests.server.test_drafter import TARGET, options

AT_ONCE = 8
NO_ANSWER_S = 300
"""Who waits longer has been forgotten: requests take seconds, also on a busy machine."""

DIFFUSION = Model(vocab_size=512, eos=1, context=MAX_MODEL_LEN, canvas_length=CANVAS)
DRAFTER = Model(vocab_size=512, eos=1, context=MAX_MODEL_LEN, canvas_length=None)
SEEING = Model(vocab_size=512, eos=1, context=MAX_MODEL_LEN, canvas_length=32, most_images=3)


def make_seeing(folder: Path) -> Path:
    """A random checkpoint that takes pictures of any size, in few steps: it never converges."""
    path = make_tiny_checkpoint(folder / "seeing", sees=True)
    generation = json.loads((path / "generation_config.json").read_text())
    generation["max_denoising_steps"] = 3
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


# The checkpoint, which a folder may be needed for, its model, and options of the server.
SERVERS: dict[str, tuple[Callable[[Path], Path], Model, list[str]]] = {
    "diffusion": (lambda _: CHECKPOINT, DIFFUSION, [*UNCOMPILED, "--max-num-seqs", "32"]),
    "drafter": (
        lambda _: TARGET,
        DRAFTER,
        options(DRAFTER_CHECKPOINT, 15, width_policy="acceptance"),
    ),
    "images": (
        make_seeing,
        SEEING,
        ["--enforce-eager", "--limit-mm-per-prompt", f'{{"image": {SEEING.most_images}}}'],
    ),
}
MOST_GROWTH = 1 << 30
"""Bytes of a server's memory, at the peak: a step's tensors, and some pictures at a time."""


def send(port: int, request: DrawnRequest) -> tuple[int, str]:
    """HTTP status, and the answer's text."""
    body = json.dumps(request.body).encode()
    url = f"http://127.0.0.1:{port}/v1/{request.path}"
    try:
        with urlopen(
            Request(url, body, {"Content-Type": "application/json"}), timeout=NO_ANSWER_S
        ) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()
    except OSError as error:
        raise Broken(f"no answer: {error!r}") from error


class Fuzz:
    """Figures of what was sent."""

    def __init__(self, port: int, checkpoint: Path, model: Model) -> None:
        self.port, self.name, self.model = port, str(checkpoint), model
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.statuses: Counter[int] = Counter()
        self.broken: list[str] = []

    def send_one(self, request: DrawnRequest) -> str | None:
        """What is wrong with its answer."""
        try:
            status, text = send(self.port, request)
            self.statuses[status] += 1
            check(request, status, text, self.model, self.tokenizer)
        except Exception as error:  # a checker that fails is told of, too
            return f"{error!r}\n  of {request.path} {json.dumps(request.body)}"
        return None

    def run(self, count: int, number: int = 0) -> None:
        """Sends about so many requests, drawn with the seed `number`; keeps what is broken."""
        with ThreadPoolExecutor(AT_ONCE) as pool:

            def together(drawn: list[DrawnRequest]) -> None:
                self.broken += filter(None, pool.map(self.send_one, drawn))

            self._given(together, count // AT_ONCE, number)()

    def _given(
        self, function: Callable[[list[DrawnRequest]], None], count: int, number: int
    ) -> Callable[[], None]:
        one = requests(self.model, self.name)
        drawn: Any = given(st.lists(one, min_size=AT_ONCE, max_size=AT_ONCE))(function)
        return settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # what is broken is kept; the rest goes on
            suppress_health_check=list(HealthCheck),
        )(seed(number)(drawn))

    def plain_answers(self) -> list[str]:
        """Of requests that none of the others may change: text, and a picture where it is seen.

        How many drafts a target verifies depends on how fast steps are, so with a drafter only the
        most probable tokens are the same each time.
        """
        body = {"model": self.name, "seed": 3, "max_tokens": 24, "ignore_eos": True}
        temperature = 0.0 if self.model.canvas_length is None else 0.7
        text = DrawnRequest(
            "completions", {**body, "prompt": [5, 6, 7, 33, 20], "temperature": temperature}
        )
        picture = {"type": "image_url", "image_url": {"url": data_url(made("a strip"))}}
        chat = {"messages": [{"role": "user", "content": [picture]}]}
        seen = DrawnRequest("chat/completions", body | chat)
        answers = []
        for request in (text, seen) if self.model.most_images else (text,):
            status, answer = send(self.port, request)
            if status != 200:
                raise Broken(f"HTTP {status}: {answer[:500]}")
            answers.append(json.dumps(json.loads(answer)["choices"]))
        return answers


def attack(name: str, count: int, number: int, folder: Path) -> Fuzz:
    """Starts a server of `SERVERS` and sends it so many requests. The last things that may be
    broken are requests of another client, and the server's memory."""
    make, model, arguments = SERVERS[name]
    checkpoint = make(folder)
    process, server = start_serving(checkpoint, folder, *arguments)
    try:
        fuzz = Fuzz(server.port, checkpoint, model)
        before = fuzz.plain_answers()
        held = peak_memory(process)
        fuzz.run(count, number)
        if (after := fuzz.plain_answers()) != before:
            fuzz.broken.append(f"plain requests were answered {before!r}, and {after!r} at the end")
        if (growth := peak_memory(process) - held) > MOST_GROWTH:
            fuzz.broken.append(f"the server's memory grew by {growth >> 20} MiB")
    finally:
        stop(process)
    return fuzz
