"""A `vllm serve` process for as long as a `with` block lasts."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from vllm_dllm.demo.errors import DemoError

HOST = "127.0.0.1"
STOP_SECONDS = 20  # after this long, a server that was asked to stop is killed
FIRST_ERRORS, LAST_LINES = 3, 12  # lines of its log to show when it ends


def serve_command(checkpoint: Path, port: int, trace: Path) -> list[str]:
    """`make serve` with this interpreter and with every step's canvases written to `trace`."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "1G"),
        "--enforce-eager",  # compiling takes longer than the whole demo
        *("--additional-config", json.dumps({"vllm_dllm": {"trace_path": str(trace)}})),
    ]


def check_checkpoint(checkpoint: Path) -> None:
    """Raises DemoError unless the folder looks like a checkpoint."""
    if not checkpoint.is_dir():
        raise DemoError(
            f"there is no folder '{checkpoint}'. The shipped checkpoint is in the project's "
            f"repository: run this from the top folder of a clone, or name the folder of a "
            f"checkpoint: vllm-dllm demo FOLDER"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise DemoError(f"'{checkpoint}' is not a complete checkpoint: it has no {name}.")


def choose_port(wanted: int | None) -> int:
    """`wanted` if nothing listens there, else a DemoError; any free port for None."""
    with socket.socket() as probe:
        # As the server will: a port whose connections are merely closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except (OSError, OverflowError) as error:
            raise DemoError(
                f"cannot listen on port {wanted} ({error}). Choose another one, or leave --port "
                f"out: the demo then takes a free one."
            ) from error
        return probe.getsockname()[1]


class Server:
    """Starts on entering the block, answers after `wait_until_ready`, is gone after the block.

    It runs in a process group of its own, so that Ctrl-C reaches the demo alone, and stopping it
    stops the engine processes it started.
    """

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.port = port
        self.log = log
        self._command = command

    def __enter__(self) -> "Server":
        # A key meant for someone's real server would lock the demo out of its own.
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:  # also when Ctrl-C is pressed again while waiting
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> None:
        """Signals the whole process group; engine processes may outlive their parent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait_until_ready(self, waiting: Callable[[float], None]) -> float:
        """Seconds until the server answered; calls `waiting(seconds so far)` several times a
        second. Raises DemoError if the server ends."""
        start = time.monotonic()
        while not self._is_healthy():
            self.check_alive()
            waiting(time.monotonic() - start)
            time.sleep(0.2)
        return time.monotonic() - start

    def check_alive(self) -> None:
        """Raises DemoError with the end of the log if the server's process has ended."""
        status = self._process.poll()
        if status is not None:
            ended = f"was killed by signal {-status}" if status < 0 else f"ended ({status})"
            raise DemoError(f"the server {ended}. From its log, {self.log}:\n\n{self._excerpt()}")

    def _excerpt(self) -> str:
        """The first errors of the log, and its end: vLLM names the cause well before the end."""
        lines = self.log.read_text(errors="replace").splitlines()
        before, end = lines[:-LAST_LINES], lines[-LAST_LINES:]
        errors = [line for line in before if re.search(r"\b\w+(Error|Exception): ", line)]
        return "\n".join([*errors[:FIRST_ERRORS], *(["[...]"] if before else []), *end])

    def last_log_line(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines()[-1:])

    def _is_healthy(self) -> bool:
        # Not urllib: it would ask a proxy, if the environment names one.
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
