"""Runs a `vllm serve` process for the length of a `with` block."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import httpx

from vllm_dllm.errors import ServerError

HOST = "127.0.0.1"
STOP_SECONDS = 20  # after this long, a server that was asked to stop is killed
ENDING_SECONDS = 3  # a server whose connections broke has ended within this time, if it ends
FIRST_ERRORS, LAST_LINES = 3, 12  # log lines to show when a server has ended by itself


def serve_command(checkpoint: Path, port: int, *options: str) -> list[str]:
    """Returns the command that runs `vllm serve` with this interpreter. The server listens on this
    machine only."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    return [*command, "--host", HOST, "--port", str(port), *options]


def check_checkpoint(checkpoint: Path) -> None:
    """Raises ServerError unless the folder looks like a checkpoint: it has a config and a
    tokenizer."""
    if not checkpoint.is_dir():
        raise ServerError(
            f"there is no folder '{checkpoint}'. Name the folder of a checkpoint, for example the "
            f"small one of this package, which `vllm-dllm checkpoint` prints."
        )
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise ServerError(f"'{checkpoint}' is not a complete checkpoint: it has no {name}.")


def choose_port(wanted: int | None) -> int:
    """Returns `wanted`, or any free port if it is None. Raises ServerError if the port cannot be
    used. Another program may take the port before the server does."""
    with socket.socket() as probe:
        # As the server will: a port whose connections are merely closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"cannot listen on port {wanted} ({error}). Choose another one, or leave --port "
                f"out to take a free one."
            ) from error
        return probe.getsockname()[1]


@contextlib.contextmanager
def log_folder(command: str) -> Iterator[Path]:
    """Yields a new folder for the logs of a sub-command. It stays only if an error ends the block:
    the logs tell more about it. Ctrl-C and signals are no errors."""
    folder = Path(tempfile.mkdtemp(prefix=f"vllm-dllm-{command}-"))
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


class Server:
    """A server process that runs as long as its `with` block. It answers once `wait_until_ready`
    returns.

    The process has its own process group. So Ctrl-C reaches only the program that uses the server,
    and stopping the server also stops its engine processes. In the block, SIGTERM and SIGHUP raise
    SystemExit, so that the block ends, unless they are ignored. Use it in the main thread only.
    """

    def __init__(
        self, command: list[str], port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts nothing yet. `command` is to listen on `port`; its output goes to the file `log`.
        The process gets `environment` on top of this process' own, without VLLM_API_KEY."""
        self.port = port
        self.log = log
        self._command = command
        # A key meant for someone's real server would lock us out of our own.
        inherited = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
        self._environment = inherited | dict(environment or {})

    def __enter__(self) -> "Server":
        """Starts the process, and does not wait for its answer."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        # Under nohup, the command goes on when its terminal is closed.
        self._handlers = {
            number: signal.signal(number, _raise_exit)
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        """Asks the process group to stop, kills it after `STOP_SECONDS`, and waits for its end."""
        try:
            self._send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:  # also when Ctrl-C is pressed again while waiting
            self._send_signal(signal.SIGKILL)
            self._process.wait()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    @property
    def pid(self) -> int:
        """The id of the server's process, which is also that of its group."""
        return self._process.pid

    def _send_signal(self, number: int) -> None:
        """Sends a signal to the process group, if it still exists: engine processes may outlive
        their parent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait_until_ready(self, show_wait: Callable[[float], None]) -> float:
        """Waits until the server answers, and returns the seconds that it took. Several times a
        second calls `show_wait` with the seconds since the start of the wait. Raises ServerError if
        the server ends."""
        start = time.monotonic()
        # trust_env: a proxy named in the environment has no business with our own server.
        with httpx.Client(timeout=5, trust_env=False) as client:
            while not self._is_healthy(client):
                self.check_alive()
                show_wait(time.monotonic() - start)
                time.sleep(0.2)
        return time.monotonic() - start

    def check_alive(self, patience_s: float = 0) -> None:
        """Raises ServerError, with the end of the log, if the server's process has ended or ends
        within `patience_s` seconds. A connection breaks before the process is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        status = self._process.poll()
        if status is not None:
            ended = f"was killed by signal {-status}" if status < 0 else f"ended ({status})"
            # Its first errors and its last lines: vLLM logs the cause long before the end.
            lines = self.log.read_text(errors="replace").splitlines()
            before, end = lines[:-LAST_LINES], lines[-LAST_LINES:]
            errors = [line for line in before if re.search(r"\b\w+(Error|Exception): ", line)]
            shown = "\n".join([*errors[:FIRST_ERRORS], *(["[...]"] if before else []), *end])
            raise ServerError(f"the server {ended}. From its log, {self.log}:\n\n{shown}")

    def _is_healthy(self, client: httpx.Client) -> bool:
        """Returns whether the server answers on /health with 200."""
        try:
            return client.get(f"http://{HOST}:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False


def _raise_exit(number: int, stack: FrameType | None) -> None:
    """Handles a signal: raises SystemExit with the usual exit status."""
    raise SystemExit(128 + number)
