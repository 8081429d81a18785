"""Sends canvases to the API processes whose clients watch, from a thread of its own.

A step queues what it copies and goes on; the thread waits for the copy and sends it as it is. A
client that reads too slowly misses canvases: the queue keeps the newest, and a full socket drops
them.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from vllm_dllm.config.canvas_feeds import pack_canvases, pack_end
from vllm_dllm.step.watched.canvas_record import StepCanvases

QUEUE_STEPS = 64
SOCKET_MESSAGES = 64


class Watcher(NamedTuple):
    """A request whose canvases somebody wants, and how its blocks are counted."""

    socket: Path
    topic: bytes
    first: int  # absolute position at which block 0 begins, or would if it were whole
    width: int  # tokens of a block


class QueuedStep(NamedTuple):
    """What a step leaves to the thread to send."""

    canvases: StepCanvases  # on the host, once `wait` returns
    wait: Callable[[], None]
    lengths: list[int]
    watchers: list[Watcher]


class CanvasSender:
    """A queue of steps, and the thread that sends them."""

    def __init__(self) -> None:
        self._steps: deque[QueuedStep | Watcher] = deque(maxlen=QUEUE_STEPS)
        self._has_steps = threading.Event()
        self._context = zmq.Context()
        self._sockets: dict[Path, zmq.Socket[bytes]] = {}
        threading.Thread(target=self._run, daemon=True, name="CanvasSender").start()

    def send_step(self, step: QueuedStep) -> None:
        """Queues a step's canvases. Never waits."""
        self._steps.append(step)
        self._has_steps.set()

    def send_end(self, watcher: Watcher) -> None:
        """Queues the message that a request's canvases have ended; more come if it was preempted.
        Never waits."""
        self._steps.append(watcher)
        self._has_steps.set()

    def _run(self) -> None:
        """Sends what steps leave, in their order, for as long as the process lives."""
        while True:
            self._has_steps.wait()
            self._has_steps.clear()
            while self._steps:
                step = self._steps.popleft()
                if isinstance(step, Watcher):
                    self._push(step.socket, pack_end(step.topic))
                    continue
                step.wait()
                self._send(step)

    def _send(self, step: QueuedStep) -> None:
        """Sends a step: one message for each API process, whatever the number of its clients."""
        shown, watchers = step.canvases, step.watchers
        blocks = [
            (start - watcher.first) // watcher.width
            for start, watcher in zip(shown.start.tolist(), watchers, strict=True)
        ]
        columns = (step.lengths, blocks, shown.step.tolist(), shown.finished.tolist())
        arrays = (
            np.array(columns, dtype=np.int32).T,
            shown.temperature.float().numpy(),
            shown.tokens.int().numpy(),
            shown.entropy_nats.float().numpy(),
            shown.accepted.numpy(),
        )
        rows: dict[Path, list[int]] = {}
        for i, denoises in enumerate(shown.denoises.tolist()):
            if denoises:
                rows.setdefault(watchers[i].socket, []).append(i)
        for path, index in rows.items():
            topics = [watchers[i].topic for i in index]
            some = arrays if len(index) == len(watchers) else [array[index] for array in arrays]
            self._push(path, pack_canvases(topics, *some))

    def _push(self, path: Path, message: bytes) -> None:
        """Sends a message, or drops it if the API process does not keep up."""
        with contextlib.suppress(zmq.Again):
            self._socket(path).send(message, zmq.NOBLOCK)

    def _socket(self, path: Path) -> "zmq.Socket[bytes]":
        """Returns the socket to an API process, connected when first used."""
        socket = self._sockets.get(path)
        if socket is None:
            socket = self._sockets[path] = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, SOCKET_MESSAGES)
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
        return socket
