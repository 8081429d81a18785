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
import torch
import zmq

from vllm_dllm.config.canvas_feeds import pack_canvases, pack_end

QUEUE_STEPS = 64  # steps that may wait for the thread; the oldest one makes room
SOCKET_MESSAGES = 64  # messages that may wait in a socket


class StepCanvases(NamedTuple):
    """What a step did to n canvases, on the device or on the host."""

    tokens: torch.Tensor  # [n, C] int64, best guesses
    accepted: torch.Tensor  # [n, C] bool
    next_canvas: torch.Tensor  # [n, C] int64, what the next step reads
    entropy_nats: torch.Tensor  # [n, C]
    step: torch.Tensor  # [n] int64, 1-based
    temperature: torch.Tensor  # [n]
    start: torch.Tensor  # [n] int64, absolute position of the first token
    length: torch.Tensor  # [n] int64, positions of each canvas
    denoises: torch.Tensor  # [n] bool, the others have nothing to show
    finished: torch.Tensor  # [n] bool

    def select(self, index: torch.Tensor) -> "StepCanvases":
        """Returns copies of the canvases `index` [k] int64, which later steps do not change."""
        return StepCanvases(*(column.index_select(0, index) for column in self))

    def copy_to_host(self) -> tuple["StepCanvases", Callable[[], None]]:
        """Starts copying to the host. Returns the copies, and a function that waits until they are
        complete: call it before reading them. Copies nothing on a CPU."""
        device = self.tokens.device
        if device.type == "cpu":
            return self, lambda: None
        copies = StepCanvases(*(column.to("cpu", non_blocking=True) for column in self))
        # Sleeps instead of polling the driver, which the thread that launches kernels needs.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return copies, event.synchronize


class Watcher(NamedTuple):
    """Where the canvases of a watched request are sent."""

    socket: Path  # of the API process whose client watches
    topic: bytes  # names the request to the API process


class QueuedStep(NamedTuple):
    """One step's canvases, which the thread sends."""

    canvases: StepCanvases  # on the host, once `wait` returns
    wait: Callable[[], None]
    watchers: list[Watcher]


class CanvasSender:
    """Sends canvases from a thread, which it starts, over one socket to each API process."""

    def __init__(self) -> None:
        self._queue: deque[QueuedStep | Watcher] = deque(maxlen=QUEUE_STEPS)
        self._has_entries = threading.Event()
        self._context = zmq.Context()
        self._sockets: dict[Path, zmq.Socket[bytes]] = {}
        threading.Thread(target=self._run, daemon=True, name="CanvasSender").start()

    def send_step(self, step: QueuedStep) -> None:
        """Queues a step's canvases for the thread. Never waits: a full queue drops its oldest."""
        self._queue.append(step)
        self._has_entries.set()

    def send_end(self, watcher: Watcher) -> None:
        """Queues the message that a request's canvases have ended. More may follow if it was
        preempted. Never waits."""
        self._queue.append(watcher)
        self._has_entries.set()

    def _run(self) -> None:
        """Sends what is queued, in order, while the process lives. Waits for each step's copy."""
        while True:
            self._has_entries.wait()
            self._has_entries.clear()
            while self._queue:
                entry = self._queue.popleft()
                if isinstance(entry, Watcher):
                    self._send_message(entry.socket, pack_end(entry.topic))
                else:
                    entry.wait()
                    self._send_canvases(entry)

    def _send_canvases(self, step: QueuedStep) -> None:
        """Sends a step's canvases: one message to each API process, for all its clients."""
        shown, watchers = step.canvases, step.watchers
        columns = (shown.length, shown.start, shown.step, shown.finished)
        arrays = (
            np.array([column.tolist() for column in columns], dtype=np.int32).T,
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
            own = arrays if len(index) == len(watchers) else [array[index] for array in arrays]
            self._send_message(path, pack_canvases(topics, *own))

    def _send_message(self, path: Path, message: bytes) -> None:
        """Sends a message to the API process at `path`, or drops it if the socket is full."""
        with contextlib.suppress(zmq.Again):
            self._connect(path).send(message, zmq.NOBLOCK)

    def _connect(self, path: Path) -> "zmq.Socket[bytes]":
        """Returns the socket to the API process at `path`, which it connects at the first use."""
        socket = self._sockets.get(path)
        if socket is None:
            socket = self._sockets[path] = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, SOCKET_MESSAGES)
            socket.set(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
        return socket
