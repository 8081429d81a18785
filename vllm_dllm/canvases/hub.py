"""Receives canvases from the workers, in an API process. All requests share one local socket, and
each has a feed with a bounded buffer. A client that reads too slowly loses its oldest canvases."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from vllm_dllm.config.canvas_feeds import new_random_name, socket_path
from vllm_dllm.requests.canvas_messages import unpack_canvases

BUFFER_CANVASES = 32
_SOCKET_MESSAGES = 64


class Feed:
    """The canvases of one request that have not been sent to its client yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The feed's address, to which the worker sends: the names of the socket and of the
        request. It is one of the request's options."""
        self._canvases: deque[dict[str, Any]] = deque(maxlen=BUFFER_CANVASES)
        self._blocks: dict[int, int] = {}  # by the position of a block's first token
        self._changed = asyncio.Event()
        self.has_ended = False

    def put_canvas(self, canvas: dict[str, Any]) -> None:
        """Adds a canvas, as `unpack_canvases` yields it, with the number of its block. If the
        buffer is full, the oldest canvas is lost. A feed that had ended goes on."""
        start = canvas.pop("start")
        # Counted, since a verified draft may end, and the next one begin, at any position.
        block = self._blocks.setdefault(start, len(self._blocks))
        self._canvases.append({"block": block, **canvas})
        self.has_ended = False  # a preempted request comes back
        self._changed.set()

    def end(self) -> None:
        """Notes that the worker has sent all canvases of the request, and wakes those that wait for
        it."""
        self.has_ended = True
        self._changed.set()

    async def wait_for_canvas(self) -> None:
        """Waits until the buffer has a canvas for `take_canvas`."""
        while not self._canvases:
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_ended(self) -> None:
        """Waits until the worker has sent all canvases of the request."""
        while not self.has_ended:
            self._changed.clear()
            await self._changed.wait()

    def take_canvas(self) -> dict[str, Any] | None:
        """Removes and returns the oldest canvas; None if the buffer is empty. Does not wait."""
        return self._canvases.popleft() if self._canvases else None


class CanvasHub:
    """The feeds of all requests, and the socket that they share. The socket is opened with the
    first feed."""

    def __init__(self, folder: Path) -> None:
        """Chooses a name for the socket in `folder`, and opens nothing yet."""
        self._name = new_random_name()
        self._path = socket_path(folder, self._name)
        self._feeds: dict[bytes, Feed] = {}
        self._reader: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def open_feed(self) -> Iterator[Feed]:
        """Yields a new feed for one request, and closes it at the end of the block. Must be called
        in a running event loop."""
        if self._reader is None:
            socket = zmq.asyncio.Context().socket(zmq.PULL)
            socket.set(zmq.RCVHWM, _SOCKET_MESSAGES)
            socket.set(zmq.LINGER, 0)
            socket.bind(f"ipc://{self._path}")
            self._reader = asyncio.create_task(self._receive_canvases(socket))
        topic = new_random_name()
        feed = self._feeds[topic.encode()] = Feed(f"{self._name}/{topic}")
        try:
            yield feed
        finally:
            del self._feeds[topic.encode()]

    async def _receive_canvases(self, socket: zmq.asyncio.Socket) -> None:
        """Puts received canvases into their feeds until the hub cancels this task. Drops canvases
        whose feed has been closed."""
        try:
            while True:
                for topic, canvas in unpack_canvases(await socket.recv()):
                    if (feed := self._feeds.get(topic)) is None:
                        continue
                    if canvas is None:
                        feed.end()
                    else:
                        feed.put_canvas(canvas)
                # While messages wait, `recv` returns at once, and no other task would run.
                await asyncio.sleep(0)
        finally:
            socket.close()

    async def close(self) -> None:
        """Stops receiving, and waits until the socket is closed. The next feed opens it again."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
