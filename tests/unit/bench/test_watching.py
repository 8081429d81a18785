"""What `bench.watching` refuses to report, and how it compares."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import harness, watching
from vllm_dllm.requests.options import STREAM_CANVASES

PLAIN, PLUGIN = (SimpleNamespace(port=port) for port in (1, 2))


def stream(text: str, num_canvases: int) -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"text": letter}]} for letter in text]
    chunks[1:1] = [{"choices": [], "canvas": {}}] * num_canvases
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


@pytest.mark.parametrize(
    ("watched", "unwatched", "is_refused"),
    [
        (("ab", 3), ("ab", 0), False),
        (("ac", 3), ("ab", 0), True),
        (("ab", 0), ("ab", 0), True),
        (("ab", 3), ("ab", 3), True),
    ],
    ids=["same", "another answer", "no canvases", "canvases for nobody"],
)
def test_refuses(
    monkeypatch: pytest.MonkeyPatch,
    watched: tuple[str, int],
    unwatched: tuple[str, int],
    is_refused: bool,
) -> None:
    def ask(server: Any, model: Path, asked: dict[str, Any]) -> bytes:
        watches = STREAM_CANVASES in asked["vllm_xargs"]
        return stream(*(watched if watches and server is PLUGIN else unwatched))

    monkeypatch.setattr(watching, "ask", ask)
    servers: Any = [PLAIN, PLUGIN]
    if is_refused:
        with pytest.raises(harness.Refused):
            watching.check(servers, Path("model"))
    else:
        watching.check(servers, Path("model"))
