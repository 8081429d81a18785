"""A stream of server-sent events with others put between: never inside one, never after the end.

What comes may be split anywhere. An event is sent on when it is complete.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_dllm.canvases.hub import Feed

DONE = b"data: [DONE]"
_END = b"\n\n"
Send = Callable[[bytes], Awaitable[None]]


class Interleaved:
    """Sends canvases between `start` and `close`, which must come however the stream ends."""

    def __init__(
        self,
        send: Send,
        feed: Feed,
        event_of: Callable[[dict[str, Any]], bytes],
        grace_s: float = 1.0,
    ) -> None:
        """`grace_s`: how long the end of the stream waits at most for the last canvases, which come
        by another way and may be late."""
        self._send, self._feed, self._event_of = send, feed, event_of
        self._grace_s = grace_s
        self._incomplete = b""
        self._turn = asyncio.Lock()
        self._is_done = False
        self._canvases: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._canvases = asyncio.create_task(self._send_canvases())

    async def close(self) -> None:
        """No canvas is sent from now on."""
        if self._canvases is not None:
            self._canvases.cancel()
            # Where a client has left, the answer's own sending says so.
            await asyncio.gather(self._canvases, return_exceptions=True)

    async def forward(self, piece: bytes) -> None:
        """A piece of the stream, wherever it was cut."""
        data = self._incomplete + piece
        end = data.rfind(_END) + len(_END) if _END in data else 0
        complete, self._incomplete = data[:end], data[end:]
        if complete and not self._is_done:
            done = _find_done(complete)
            if done is None:
                await self._send_alone(complete)
            else:
                if done > 0:
                    await self._send_alone(complete[:done])
                await self._finish(complete[done:])
        elif complete:
            await self._send_alone(complete)

    async def end(self) -> None:
        """Nothing more comes."""
        rest, self._incomplete = self._incomplete, b""
        if not self._is_done:
            await self._finish(rest)
        elif rest:
            await self._send_alone(rest)

    async def _finish(self, rest: bytes) -> None:
        """The canvases that are still there, then `rest`, and no canvas after it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._feed.until_ended()
        async with self._turn:
            while (canvas := self._feed.take()) is not None:
                await self._send(self._event_of(canvas))
            self._is_done = True
            if rest:
                await self._send(rest)

    async def _send_alone(self, data: bytes) -> None:
        async with self._turn:
            await self._send(data)

    async def _send_canvases(self) -> None:
        while not self._is_done:
            await self._feed.wait()
            async with self._turn:
                canvas = None if self._is_done else self._feed.take()
                if canvas is not None:
                    await self._send(self._event_of(canvas))


def _find_done(events: bytes) -> int | None:
    """Finds where the event begins that ends the stream."""
    if events.startswith(DONE):
        return 0
    found = events.find(_END + DONE)
    return None if found < 0 else found + len(_END)
