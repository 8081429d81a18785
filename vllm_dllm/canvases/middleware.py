"""Stands between a client and vLLM's two streaming routes, and puts canvases into their streams.

Nobody else's connection carries them, so there is nothing to keep apart.
"""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_dllm.canvases.hub import CanvasHub, Feed
from vllm_dllm.canvases.interleaving import Interleaved
from vllm_dllm.canvases.watched import PREFIXES, RefusedError, Watched, read_request

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Texts = Callable[[list[int]], list[str]]
OBJECT = "vllm_dllm.canvas"


class CanvasStreams:
    """Pure ASGI. `source` gives the feeds and the texts of tokens; None: this server has none."""

    def __init__(self, app: App, source: Callable[[], tuple[CanvasHub, Texts] | None]) -> None:
        self._app, self._source = app, source

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in PREFIXES:
            return await self._app(scope, receive, send)
        source = self._source()
        if source is None:
            return await self._app(scope, receive, send)
        body = await _read_body(receive)
        if body is None:  # the client has left
            return
        try:
            watched = read_request(path, scope["headers"], body)
        except RefusedError as error:
            return await _refuse(send, str(error))
        if watched is None:
            return await self._app(scope, _replay(body, receive), send)
        hub, texts = source
        with hub.open() as feed:
            changed = watched.body_for(feed.name)
            length = (b"content-length", str(len(changed)).encode())
            headers = [h for h in watched.headers if h[0].lower() != b"content-length"]
            inner = {**scope, "headers": [*headers, length]}
            await self._serve(inner, _replay(changed, receive), send, watched, feed, texts)

    async def _serve(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        watched: Watched,
        feed: Feed,
        texts: Texts,
    ) -> None:
        created = int(time.time())

        def event_of(canvas: dict[str, Any]) -> bytes:
            event: dict[str, Any] = {
                "id": watched.chunk_id,
                "object": OBJECT,
                "created": created,
                "model": watched.body.get("model"),
                "choices": [],
                "canvas": canvas | {"texts": texts(canvas["tokens"])},
            }
            return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"

        async def send_data(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        stream = Interleaved(send_data, feed, event_of)
        is_stream = False  # an error is not

        async def send_between(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = message["status"] == 200 and _is_event_stream(message)
                await send(message)
                if is_stream:
                    stream.start()
            elif message["type"] == "http.response.body" and is_stream:
                await stream.forward(message.get("body", b""))
                if not message.get("more_body", False):
                    await stream.end()
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await send(message)

        try:
            await self._app(scope, receive, send_between)
        finally:
            await stream.close()


def _is_event_stream(start: Message) -> bool:
    headers = {key.lower(): value for key, value in start["headers"]}
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


async def _read_body(receive: Receive) -> bytes | None:
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives `body` in one piece, then what else comes: that the client has left."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _refuse(send: Send, text: str) -> None:
    """Answers as vLLM does when it refuses a request."""
    error = {"message": text, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
