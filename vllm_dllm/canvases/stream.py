"""Puts events of canvases between the server-sent events of a stream: never inside of an event, and
never after the last one. The stream may come in pieces that are cut anywhere. Its own events are
sent on whole."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_dllm.canvases.hub import Feed

DONE = b"data: [DONE]"
_END = b"\n\n"
Send = Callable[[bytes], Awaitable[None]]


class InterleavedStream:
    """One stream of an answer, with its canvases. Canvases are sent between `start` and `close`.
    `close` must be called however the stream ends."""

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
        """Starts a task that sends canvases as they come. Call it once, after the response's
        headers."""
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
