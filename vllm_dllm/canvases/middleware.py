"""Middleware of vLLM's two streaming routes. It asks the engine for the canvases that a request
wants, and puts them into the request's own stream. So no client sees the canvases of others."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_dllm.canvases.hub import CanvasHub, Feed, InterleavedStream
from vllm_dllm.config.canvas_feeds import FEED
from vllm_dllm.requests.options import STREAM_CANVASES

TokenTexts = Callable[[list[int]], list[str]]
"""Token ids -> the text of each token."""
CanvasSource = tuple[CanvasHub, TokenTexts, str]
"""Where canvases come from, the texts of their tokens, and the first name of the served model."""
OBJECT = "vllm_dllm.canvas"
PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
"""Route -> the beginning of its chunks' ids."""
RawHeaders = list[tuple[bytes, bytes]]


class RefusedError(ValueError):
    """Says why a request is refused with HTTP 400."""


@dataclass(frozen=True)
class WatchedRequest:
    """A request that asks for its canvases."""

    body: dict[str, Any]  # as the client sent it
    chunk_id: str  # `id` of vLLM's chunks and of ours
    headers: RawHeaders  # with an X-Request-Id, from which vLLM makes `chunk_id`
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, seconds

    def for_engine(self, feed_name: str) -> tuple[RawHeaders, bytes]:
        """Returns the headers and the body of the request for vLLM. There the name of the feed
        replaces `diffusion_stream_canvases`."""
        xargs = self.body["vllm_xargs"].items()
        changed = {k: v for k, v in xargs if k != STREAM_CANVASES} | {FEED: feed_name}
        body = json.dumps(self.body | {"vllm_xargs": changed}).encode()
        headers = [h for h in self.headers if h[0].lower() != b"content-length"]
        return [*headers, (b"content-length", str(len(body)).encode())], body

    def format_canvas(self, texts: TokenTexts, served_model: str, canvas: dict[str, Any]) -> bytes:
        """Returns a canvas, with the text of each token, as a server-sent event. `served_model`:
        the model that answers where a request names none."""
        event: dict[str, Any] = {
            "id": self.chunk_id,
            "object": OBJECT,
            "created": self.created,
            "model": self.body.get("model") or served_model,
            "choices": [],
            "canvas": canvas | {"texts": texts(canvas["tokens"])},
        }
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def parse_watched_request(
    path: str,  # a key of `PREFIXES`
    headers: RawHeaders,
    body: bytes,
) -> WatchedRequest | None:
    """Returns the request if it asks for canvases. Returns None if it asks for none, or if its body
    is no JSON, which vLLM refuses. Where there is no X-Request-Id, adds one to the headers: the
    body's `request_id`, or a random one. Raises RefusedError if the request asks for canvases, but
    is not a stream of one answer."""
    if STREAM_CANVASES.encode() not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the latter: nested too deep
        return None
    extra = request.get("vllm_xargs") if isinstance(request, dict) else None
    # JSON's true is Python's True and equals 1, which is what vllm_xargs makes of it.
    wanted = extra.get(STREAM_CANVASES) if isinstance(extra, dict) else None
    if not (isinstance(wanted, int) and wanted == 1):
        return None
    _check_request(request)
    name = next((v.decode("latin-1") for k, v in headers if k.lower() == b"x-request-id"), None)
    if name is None:
        own = request.get("request_id")
        name = own if isinstance(own, str) and own.isascii() and own else uuid.uuid4().hex
        headers = [*headers, (b"x-request-id", name.encode("latin-1"))]
    return WatchedRequest(request, f"{PREFIXES[path]}-{name}", headers)


def _check_request(request: dict[str, Any]) -> None:
    """Raises RefusedError unless the request is a stream of one answer."""
    if request.get("stream") is not True:
        raise RefusedError(
            f"{STREAM_CANVASES} needs a stream, got stream = {request.get('stream')!r}. Set stream "
            f"to true, or leave the key out."
        )
    if request.get("n") not in (None, 1):
        raise RefusedError(
            f"{STREAM_CANVASES} shows one answer, got n = {request['n']!r}. Set n to 1, or leave "
            f"the key out."
        )
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise RefusedError(
            f"{STREAM_CANVASES} shows one answer, got {len(prompt)} prompts. Send one prompt a "
            f"request, or leave the key out."
        )


class CanvasStreams:
    """The middleware, in pure ASGI, which sends canvases to the clients that ask for them."""

    def __init__(
        self,
        app: ASGIApp,
        source: Callable[[], CanvasSource | None],  # returns None: no canvases
    ) -> None:
        self._app, self._source = app, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on to vLLM, and adds its canvases to the answer if it asks for them.
        Answers itself with HTTP 400 if it asks for canvases that cannot be sent."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", "").rstrip("/"))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in PREFIXES:
            return await self._app(scope, receive, send)
        source = self._source()
        if source is None:
            return await self._app(scope, receive, send)
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        try:
            watched = parse_watched_request(path, scope["headers"], body)
        except RefusedError as refused:
            kind = {"type": "BadRequestError", "param": "vllm_xargs", "code": 400}
            error = {"error": {"message": str(refused)} | kind}  # as vLLM answers
            return await JSONResponse(error, HTTPStatus.BAD_REQUEST)(scope, receive, send)
        if watched is None:
            return await self._app(scope, _replay(body, receive), send)
        hub, texts, served_model = source
        with hub.open_feed() as feed:
            headers, body = watched.for_engine(feed.name)
            inner = {**scope, "headers": headers}
            format_event = partial(watched.format_canvas, texts, served_model)
            await self._serve_watched(inner, _replay(body, receive), send, feed, format_event)

    async def _serve_watched(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        feed: Feed,
        format_event: Callable[[dict[str, Any]], bytes],
    ) -> None:
        """Has vLLM answer the request, and puts the canvases of `feed` into the stream as
        `format_event` writes them. An answer that is no event stream, such as an error, is passed
        on unchanged."""

        async def send_data(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        stream = InterleavedStream(send_data, feed, format_event)
        is_stream = False  # an error is not

        async def send_with_canvases(message: Message) -> None:
            """Passes vLLM's messages on, those of event streams by `stream`, which adds
            canvases."""
            nonlocal is_stream
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"]).get("content-type", "")
                is_stream = message["status"] == 200 and kind.startswith("text/event-stream")
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
            await self._app(scope, receive, send_with_canvases)
        finally:
            await stream.close()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that first returns `body` in one message. After that it returns what
    really comes, such as a disconnect of the client."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
