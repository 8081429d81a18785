"""Which requests ask for their canvases, and what the engine is asked instead."""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_dllm.config.canvas_feeds import FEED
from vllm_dllm.requests.options import STREAM_CANVASES

PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
"""How the ids begin that vLLM gives to the chunks of its streams, by route."""
Headers = list[tuple[bytes, bytes]]


class RefusedError(ValueError):
    """A request that is answered with HTTP 400."""


@dataclass(frozen=True)
class Watched:
    """A request whose client wants the canvases, too."""

    body: dict[str, Any]
    chunk_id: str  # `id` of vLLM's chunks and of ours
    headers: Headers  # with the name that the id is made of

    def body_for(self, feed: str) -> bytes:
        """Makes what the engine is asked: the same, but for where the canvases go."""
        extra = {k: v for k, v in self.body["vllm_xargs"].items() if k != STREAM_CANVASES}
        return json.dumps(self.body | {"vllm_xargs": extra | {FEED: feed}}).encode()


def read_request(
    path: str, headers: Headers, body: bytes, new_id: Callable[[], str] = lambda: uuid.uuid4().hex
) -> Watched | None:
    """Finds out whether a request asks for canvases. None: it is like any other, or vLLM has the
    better complaint. Raises RefusedError."""
    if STREAM_CANVASES.encode() not in body:
        return None
    try:
        request = json.loads(body)
    except ValueError:
        return None
    extra = request.get("vllm_xargs") if isinstance(request, dict) else None
    # JSON's true is Python's True and equals 1, which is what vllm_xargs makes of it.
    wanted = extra.get(STREAM_CANVASES) if isinstance(extra, dict) else None
    if not (isinstance(wanted, int) and wanted == 1):
        return None
    _check(request)
    name = next((v.decode("latin-1") for k, v in headers if k.lower() == b"x-request-id"), None)
    if name is None:
        given = request.get("request_id")
        name = given if isinstance(given, str) and given.isascii() and given else new_id()
        headers = [*headers, (b"x-request-id", name.encode("latin-1"))]
    return Watched(request, f"{PREFIXES[path]}-{name}", headers)


def _check(request: dict[str, Any]) -> None:
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
