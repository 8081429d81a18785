"""An API process' end of the feeds: one local socket, and a bounded buffer for each client.

A client that reads too slowly loses canvases, the oldest first.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from vllm_dllm.config.canvas_feeds import new_random_name, socket_path, unpack_canvases

BUFFER_CANVASES = 32
_SOCKET_MESSAGES = 64


class Feed:
    """The canvases of one request that its client has not got yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        """What the request carries, so that the worker sends here."""
        self._canvases: deque[dict[str, Any]] = deque(maxlen=BUFFER_CANVASES)
        self._changed = asyncio.Event()
        self.has_ended = False

    def put(self, canvas: dict[str, Any]) -> None:
        self._canvases.append(canvas)
        self.has_ended = False  # a preempted request comes back
        self._changed.set()

    def end(self) -> None:
        """The worker has dropped the request, and sent all there was."""
        self.has_ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Waits until there is a canvas to take."""
        while not self._canvases:
            self._changed.clear()
            await self._changed.wait()

    async def until_ended(self) -> None:
        while not self.has_ended:
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> dict[str, Any] | None:
        return self._canvases.popleft() if self._canvases else None


class CanvasHub:
    """One socket for all feeds; it listens from the first one on."""

    def __init__(self, folder: Path) -> None:
        self._name = new_random_name()
        self._path = socket_path(folder, self._name)
        self._feeds: dict[bytes, Feed] = {}
        self._reader: asyncio.Task[None] | None = None

    @property
    def num_feeds(self) -> int:
        return len(self._feeds)

    @contextlib.contextmanager
    def open(self) -> Iterator[Feed]:
        """Gives one request a feed of its own."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(self._listen()))
        topic = new_random_name()
        feed = self._feeds[topic.encode()] = Feed(f"{self._name}/{topic}")
        try:
            yield feed
        finally:
            del self._feeds[topic.encode()]

    def _listen(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context().socket(zmq.PULL)
        socket.set(zmq.RCVHWM, _SOCKET_MESSAGES)
        socket.set(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._path}")
        return socket

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                for topic, canvas in unpack_canvases(await socket.recv()):
                    if (feed := self._feeds.get(topic)) is None:
                        continue
                    if canvas is None:
                        feed.end()
                    else:
                        feed.put(canvas)
                # Where more waits, `recv` does not let others run: not those either who send what
                # has come.
                await asyncio.sleep(0)
        finally:
            socket.close()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
