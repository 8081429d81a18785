"""Receives canvases from the workers, in an API process. All requests share one local socket, and
each has a feed with a bounded buffer. A client that reads too slowly loses its oldest canvases. All
others go between the events of its stream."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from vllm_dllm.config.canvas_feeds import new_random_name, socket_path, unpack_canvases

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
        """Notes that the worker has sent all canvases of the request. Wakes those that wait."""
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
    """The feeds of all requests, and the socket that they share, opened with the first feed."""

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


DONE = b"data: [DONE]"
_END = b"\n\n"
Send = Callable[[bytes], Awaitable[None]]


class InterleavedStream:
    """One stream of an answer, with its canvases between the server-sent events: never inside of an
    event, and never after the last one. The stream may come in pieces that are cut anywhere. Its
    own events are sent on whole. Canvases are sent between `start` and `close`, which must be
    called however the stream ends."""

    def __init__(
        self,
        send: Send,
        feed: Feed,
        format_event: Callable[[dict[str, Any]], bytes],
        grace_s: float = 1.0,
    ) -> None:
        """Makes a stream that passes bytes to `send`, with the canvases of `feed` as `format_event`
        writes them. Sends nothing yet. The end of the stream waits at most `grace_s` seconds for
        the last canvases, which come through another socket."""
        self._send, self._feed, self._format_event = send, feed, format_event
        self._grace_s = grace_s
        self._incomplete = b""
        self._lock = asyncio.Lock()  # held while something is sent
        self._is_done = False  # whether the last events of the stream have been sent
        self._canvases: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts a task that sends canvases as they come. Call it after the response's headers."""
        self._canvases = asyncio.create_task(self._send_canvases())

    async def close(self) -> None:
        """Stops sending canvases, and waits until the task has ended. Its errors are dropped."""
        if self._canvases is not None:
            self._canvases.cancel()
            # Errors of a client that has left are raised where the answer is sent.
            await asyncio.gather(self._canvases, return_exceptions=True)

    async def forward(self, piece: bytes) -> None:
        """Sends the events that are complete with this piece of the stream, and keeps the rest for
        the next piece. Before the event that ends the stream, sends the remaining canvases."""
        complete, separator, self._incomplete = (self._incomplete + piece).rpartition(_END)
        events = complete + separator
        done = (_END + events).find(_END + DONE)  # where the last event begins; -1: not in `events`
        if done < 0 or self._is_done:
            await self._send_locked(events)
        else:
            await self._send_locked(events[:done])
            await self._finish(events[done:])

    async def end(self) -> None:
        """Sends the incomplete rest, when no more pieces come. Unless the stream has had its last
        event, sends the remaining canvases first."""
        rest, self._incomplete = self._incomplete, b""
        await (self._send_locked(rest) if self._is_done else self._finish(rest))

    async def _finish(self, rest: bytes) -> None:
        """Waits up to `grace_s` seconds for the feed to end. Then sends its remaining canvases and
        after them `rest`, the last events of the stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._feed.wait_until_ended()
        async with self._lock:
            while (canvas := self._feed.take_canvas()) is not None:
                await self._send(self._format_event(canvas))
            self._is_done = True
            if rest:
                await self._send(rest)

    async def _send_locked(self, data: bytes) -> None:
        """Sends bytes while no canvas is being sent. Sends nothing if there are none."""
        if data:
            async with self._lock:
                await self._send(data)

    async def _send_canvases(self) -> None:
        """Sends canvases as they come, until the stream is done or `close` cancels this task."""
        while not self._is_done:
            await self._feed.wait_for_canvas()
            async with self._lock:
                canvas = None if self._is_done else self._feed.take_canvas()
                if canvas is not None:
                    await self._send(self._format_event(canvas))
