"""Sends canvases to the API processes whose clients watch, from a thread of its own.

A step hands over what it copies and goes on; the thread waits for the copy and sends it as it is.
Whoever reads too slowly loses canvases: the queue keeps the newest, and a full socket takes none.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from vllm_dllm.config.canvas_message import pack
from vllm_dllm.step.canvas_record import StepCanvases

QUEUE_STEPS = 64
SOCKET_MESSAGES = 256


class Watcher(NamedTuple):
    """A request whose canvases somebody wants, and how its blocks are counted."""

    socket: Path
    topic: bytes
    first: int  # absolute position at which block 0 begins, or would if it were whole
    width: int  # tokens of a block


class Sent(NamedTuple):
    """What a step leaves to the thread."""

    canvases: StepCanvases  # on the host, once `wait` returns
    wait: Callable[[], None]
    lengths: list[int]
    watchers: list[Watcher]


class CanvasSender:
    def __init__(self) -> None:
        self._steps: deque[Sent | Watcher] = deque(maxlen=QUEUE_STEPS)
        self._has_steps = threading.Event()
        self._context = zmq.Context()
        self._sockets: dict[Path, zmq.Socket[bytes]] = {}
        threading.Thread(target=self._run, daemon=True, name="CanvasSender").start()

    def put(self, step: Sent) -> None:
        """Never waits."""
        self._steps.append(step)
        self._has_steps.set()

    def end(self, watcher: Watcher) -> None:
        """Nothing more comes, unless the request was preempted. Never waits."""
        self._steps.append(watcher)
        self._has_steps.set()

    def _run(self) -> None:
        while True:
            self._has_steps.wait()
            self._has_steps.clear()
            while self._steps:
                step = self._steps.popleft()
                if isinstance(step, Watcher):
                    self._push(step, [])
                    continue
                step.wait()
                self._send(step)

    def _send(self, step: Sent) -> None:
        shown = step.canvases
        tokens, accepted = shown.tokens.int().numpy(), shown.accepted.numpy()
        entropy = shown.entropy_nats.float().numpy()
        starts, denoises = shown.start.tolist(), shown.denoises.tolist()
        numbers, finished = shown.step.tolist(), shown.finished.tolist()
        temperatures = shown.temperature.tolist()
        for i, (watcher, length) in enumerate(zip(step.watchers, step.lengths, strict=True)):
            if not denoises[i]:
                continue
            header = {
                "block": (starts[i] - watcher.first) // watcher.width,
                "step": numbers[i],
                "finished": finished[i],
                "temperature": round(temperatures[i], 4),
            }
            columns = (column[i, :length] for column in (tokens, accepted, entropy))
            self._push(watcher, pack(header, *columns))

    def _push(self, watcher: Watcher, message: list[bytes]) -> None:
        """Not where the API process does not keep up: its client misses this canvas."""
        with contextlib.suppress(zmq.Again):
            self._socket(watcher.socket).send_multipart([watcher.topic, *message], zmq.NOBLOCK)

    def _socket(self, path: Path) -> "zmq.Socket[bytes]":
        socket = self._sockets.get(path)
        if socket is None:
            socket = self._sockets[path] = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, SOCKET_MESSAGES)
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
        return socket
