"""One `vllm serve` of the shipped checkpoint for all tests here; only `test_accuracy` compiles."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from vllm import EngineArgs, LLMEngine
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engines import in_this_process
from tests.paths import CHECKPOINTS
from tests.processes import HANGS_S

CHECKPOINT = CHECKPOINTS / "diffusiongemma-tiny"
CANVAS = 64
MAX_MODEL_LEN = 1024
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--kv-cache-memory-bytes", "1G"),
)
SHORT_CANVASES = ("--diffusion-config", json.dumps({"canvas_length": CANVAS}))
# Compiling takes longer than most files of tests.
UNCOMPILED = (*SHORT_CANVASES, "--enforce-eager")

WATCHED = {"VLLM_PLUGINS": "vllm_dllm_canvas"}
"""The environment of a server whose canvases can be watched."""

KEY = "none"
"""What clients show a server, also one that asks for none."""

Complaint = Callable[..., str]


@dataclass(frozen=True)
class Server:
    port: int
    log: Path
    trace: Path
    model: str  # as requests name it

    @property
    def client(self) -> OpenAI:
        return OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, timeout=HANGS_S, max_retries=0
        )

    def chat(self, content: Any, **options: Any) -> Any:
        """The answer to one message, or its stream."""
        messages: Any = [{"role": "user", "content": content}]
        asked = {"model": self.model, "messages": messages, **options}
        return self.client.chat.completions.create(**asked)

    def read(self, path: str, body: str | dict[str, Any] | None = None) -> str:
        """What it answers to a POST of `body`, JSON, or to a GET where there is none."""
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        data = None if text is None else text.encode()
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
            return answer.read().decode()


def start(
    checkpoint: Path, log: Path, *options: str, env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server on a free port of 127.0.0.1; returns its process (group leader) and port.
    `env`: beside this process' own."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", str(port), *OPTIONS, *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
            preexec_fn=_take_interrupts,
        )
    return process, port


def _take_interrupts() -> None:
    """Also where the tests run behind a shell's `&`, which has its processes ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start_serving(
    checkpoint: Path, folder: Path, *options: str, **more: Any
) -> tuple[subprocess.Popen[bytes], Server]:
    """A server that answers, and its process; started as by `start_tracing`."""
    process, server = start_tracing(checkpoint, folder, *options, **more)
    try:
        wait_until_ready(process, server)
    except BaseException:
        stop(process)
        raise
    return process, server


def start_tracing(
    checkpoint: Path,
    folder: Path,
    *options: str,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], Server]:
    """A server that does not answer yet, and its process. `settings`: the extension's."""
    log, trace = folder / "vllm.log", folder / "trace.jsonl"
    section = {"trace_path": str(trace), **(settings or {})}
    extension = ("--additional-config", json.dumps({"vllm_dllm": section}))
    process, port = start(checkpoint, log, *extension, *options, env=env)
    return process, Server(port, log, trace, str(checkpoint))


def wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + HANGS_S
    while True:
        assert process.poll() is None, server.log.read_text()[-5000:]
        assert time.monotonic() < deadline, server.log.read_text()[-5000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)


@contextmanager
def serving(
    checkpoint: Path, folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    process, server = start_serving(checkpoint, folder, *options, env=env)
    try:
        yield server
    finally:
        stop(process)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*UNCOMPILED, "--max-num-seqs", "32", "--enable-prompt-tokens-details")
    options += ("--enable-scale-out",)
    folder = tmp_path_factory.mktemp("server")
    with serving(CHECKPOINT, folder, *options, env=WATCHED) as it:
        yield it


@pytest.fixture
def complaint() -> Iterator[Complaint]:
    """Of a checkpoint and options of `vllm serve` that cannot be served: what the start of their
    engine ends with. A server, `last_words`, takes half a minute to get there."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def start(checkpoint: Path, *options: str) -> str:
        arguments = parser.parse_args(["--model", str(checkpoint), *OPTIONS, *options])
        with pytest.raises(ValueError) as refusal:
            LLMEngine.from_engine_args(EngineArgs.from_cli_args(arguments))
        return str(refusal.value)

    with in_this_process():
        yield start


def last_words(checkpoint: Path, log: Path, *options: str) -> str:
    """What a server logs that must end by itself, and not well."""
    process, _ = start(checkpoint, log, *options)
    try:
        assert process.wait(timeout=HANGS_S) != 0
    finally:
        stop(process)
    return log.read_text()
