"""Many requests at once, and what comes of each, as bytes on the wire."""

import contextlib
import http.client
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.processes import HANGS_S, wait_for
from tests.server.conftest import CHECKPOINT, Server

LONG: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 900,
    "ignore_eos": True,
    "seed": 1,
    # No canvas is finished before its last step.
    "vllm_xargs": {"diffusion_confidence_threshold": 1e-9},
}


@dataclass
class OpenRequest:
    """A request and the answer so far. Closed: by whoever gets tired of it."""

    server: Server
    body: dict[str, Any]
    status: int | None = None
    text: str = ""
    error: OSError | http.client.HTTPException | None = None
    done: bool = False
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=HANGS_S)
        with contextlib.suppress(OSError):  # tried again, and told of, by the thread
            self.connection.connect()  # now, so that there is something to close
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            body = json.dumps({"model": str(CHECKPOINT), **self.body})
            headers = {"Content-Type": "application/json"}
            self.connection.request("POST", "/v1/completions", body, headers)
            answer = self.connection.getresponse()
            self.status = answer.status
            while piece := answer.read1():
                self.text += piece.decode()
            self.done = True
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self.connection.close()

    def wait(self) -> "OpenRequest":
        self._thread.join(HANGS_S)
        assert not self._thread.is_alive(), "the request hangs"
        return self

    def leave(self, after_s: float) -> None:
        """The client closes the connection, wherever the answer is."""
        self._thread.join(after_s)
        if (sock := self.connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.wait()

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Of a stream, without the closing [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines and lines[-1] == "[DONE]", self.text[-300:]
        return [json.loads(line) for line in lines[:-1]]


def metric(server: Server, name: str) -> float:
    lines = server.read("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def unfinished(server: Server) -> int:
    return int(metric(server, "num_requests_running") + metric(server, "num_requests_waiting"))


def wait_until_unfinished(server: Server, count: int) -> None:
    wait_for(lambda: unfinished(server) == count, f"{count} unfinished requests")
