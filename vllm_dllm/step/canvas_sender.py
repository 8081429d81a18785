"""Sends canvases to the API processes whose clients watch, from a thread of its own.

A step hands over what it copies and goes on; the thread waits for the copy, writes JSON and sends.
Whoever reads too slowly loses canvases: the queue keeps the newest, and a full socket takes none.
"""

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from vllm_dllm.step.canvas_record import CanvasRecord, StepCanvases, read

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
        self._steps: deque[Sent] = deque(maxlen=QUEUE_STEPS)
        self._has_steps = threading.Event()
        self._context = zmq.Context()
        self._sockets: dict[Path, zmq.Socket[bytes]] = {}
        threading.Thread(target=self._run, daemon=True, name="CanvasSender").start()

    def put(self, step: Sent) -> None:
        """Never waits."""
        self._steps.append(step)
        self._has_steps.set()

    def _run(self) -> None:
        while True:
            self._has_steps.wait()
            self._has_steps.clear()
            while self._steps:
                step = self._steps.popleft()
                step.wait()
                records = read(step.canvases, step.lengths)
                for record, watcher in zip(records, step.watchers, strict=True):
                    if record is not None:
                        self._send(watcher, record)

    def _send(self, watcher: Watcher, record: CanvasRecord) -> None:
        socket = self._sockets.get(watcher.socket)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, SOCKET_MESSAGES)
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{watcher.socket}")
            self._sockets[watcher.socket] = socket
        block = (record.start - watcher.first) // watcher.width
        message = json.dumps(message_of(record, block), separators=(",", ":")).encode()
        try:
            socket.send_multipart([watcher.topic, message], zmq.NOBLOCK)
        except zmq.Again:
            return  # the API process does not keep up: its clients miss this canvas


def message_of(record: CanvasRecord, block: int) -> dict[str, Any]:
    """The event's `canvas`, without the texts, which the API process adds."""
    return {
        "block": block,
        "step": record.step,
        "finished": record.finished,
        "temperature": round(record.temperature, 4),
        "mean_entropy": round(record.mean_entropy, 4),
        "tokens": record.tokens,
        "accepted": record.accepted,
        "entropy": [round(value, 3) for value in record.entropy_nats],
    }
