"""A server of the shipped checkpoint, as users start it, and clients that ask it over HTTP."""

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.tools import server_process

OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "1G"),
    *("--max-num-seqs", "64", "--diffusion-config", '{"canvas_length": 64}'),
)
PATIENCE_S = 600


@dataclass
class Answered:
    status: int  # 0: the connection broke
    seconds: float
    at: float  # time.monotonic() when it was there


@contextmanager
def serving(
    checkpoint: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[server_process.Server]:
    """`environment`: beside this process' own."""
    port = server_process.choose_port(None)
    command = server_process.serve_command(checkpoint, port, *OPTIONS, *options)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with server_process.Server(command, port, log, environment) as server:
            server.wait_until_ready(lambda seconds: None)
            yield server


def ask(port: int, model: Path, body: dict[str, Any]) -> Answered:
    connection = http.client.HTTPConnection(server_process.HOST, port, timeout=PATIENCE_S)
    start = time.monotonic()
    try:
        text = json.dumps({"model": str(model), **body})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    except (OSError, http.client.HTTPException):
        status = 0
    finally:
        connection.close()
    end = time.monotonic()
    return Answered(status, end - start, end)


@contextmanager
def asking(
    port: int, model: Path, bodies: Sequence[Callable[[int], dict[str, Any]]]
) -> Iterator[list[list[Answered]]]:
    """One client for each of `bodies`, which makes a request of its number, again and again until
    the end of the block. Gives what each has been answered so far."""
    over = threading.Event()
    answers: list[list[Answered]] = [[] for _ in bodies]

    def client(i: int) -> None:
        while not over.is_set():
            answers[i].append(ask(port, model, bodies[i](len(answers[i]))))
            if answers[i][-1].status != 200:
                over.wait(0.05)  # no client asks again at once what was refused

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()
