"""What a watched request becomes for the engine, and its stream for the client: canvases between a
stream's events, however the stream is cut, and never after its end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from vllm_dllm.canvases.hub import BUFFER_CANVASES, CanvasHub, Feed, InterleavedStream
from vllm_dllm.canvases.middleware import OBJECT, CanvasStreams, parse_watched_request
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.canvas_feeds import FEED, pack_canvases, pack_end
from vllm_dllm.requests.options import STREAM_CANVASES

BODY: dict[str, Any] = {
    "model": "m",
    "prompt": "Sort: b a",
    "stream": True,
    "vllm_xargs": {STREAM_CANVASES: True, "diffusion_max_steps": 4},
}


class Engine:
    """An app that streams, and whose worker sends canvases where the request says."""

    def __init__(self, status: int = 200, num_canvases: int = 2) -> None:
        self.status, self.num_canvases = status, num_canvases
        self.body: dict[str, Any] = {}
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        data = (await receive())["body"]
        self.body, self.headers = json.loads(data), dict(scope["headers"])
        assert int(self.headers[b"content-length"]) == len(data)
        kind = b"text/event-stream; charset=utf-8" if self.status == 200 else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        extra = self.body.get("vllm_xargs")
        feed = extra.get(FEED) if isinstance(extra, dict) else None
        if feed is not None and self.status == 200:
            found = canvas_feeds.find_socket(feed)
            assert found is not None
            with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.connect(f"ipc://{found[0]}")
                for step in range(1, self.num_canvases + 1):
                    numbers = np.array([[2, 0, step, step == 2]] * 2, dtype=np.int32)
                    tokens = np.array([[8, 8], [step, 7]], dtype=np.int32)
                    nothing = np.zeros((2, 2), dtype=np.float32)
                    # The first is of somebody else, who has left.
                    topics = [b"0" * 32, found[1]]
                    message = pack_canvases(
                        topics, numbers, nothing[0], tokens, nothing, tokens == 7
                    )
                    await socket.send(message)
                await socket.send(pack_end(found[1]))
        await send(piece(b'data: {"id": "x"}\n\n', more=True))
        await send(piece(b"data: [DONE]\n\n", more=True))
        await send(piece(b"", more=False))


def piece(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def ask(
    app: Any,
    body: bytes,
    path: str = "/v1/completions",
    *headers: tuple[bytes, bytes],
    root_path: str = "",
) -> tuple[int, bytes]:
    """The status and all of the body. The request comes in pieces."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": root_path,
        "headers": [(b"content-length", b"%d" % len(body)), *headers],
    }
    pieces = [body[:5], body[5:]]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        data = pieces.pop(0)
        return {"type": "http.request", "body": data, "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


async def watch(
    folder: Path, engine: Engine, body: Any, *args: Any, **options: Any
) -> tuple[int, list[dict[str, Any]], bytes]:
    """The status, the canvas events and all that was sent."""
    hub = CanvasHub(folder)
    app = CanvasStreams(engine, lambda: (hub, lambda tokens: [f"<{t}>" for t in tokens], "served"))
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = await ask(app, data, *args, **options)
        assert not hub._feeds
    finally:
        await hub.close()
    events = [line[6:] for line in answer.split(b"\n\n") if line.startswith(b"data: {")]
    return status, [e for e in map(json.loads, events) if e.get("object") == OBJECT], answer


def test_a_watched_stream(folder: Path) -> None:
    engine = Engine()
    status, events, answer = asyncio.run(watch(folder, engine, BODY))
    assert status == 200
    assert [e["canvas"]["step"] for e in events] == [1, 2]
    assert events[1]["canvas"]["texts"] == ["<2>", "<7>"]
    name = engine.headers[b"x-request-id"].decode()
    assert all(e["id"] == f"cmpl-{name}" and e["choices"] == [] for e in events)
    assert answer.endswith(b"data: [DONE]\n\n")
    extra = engine.body["vllm_xargs"]
    assert extra.keys() == {"diffusion_max_steps", FEED}
    assert engine.body | {"vllm_xargs": None} == BODY | {"vllm_xargs": None}


@pytest.mark.parametrize(
    ("root_path", "path"), [("/x", "/x"), ("/x", ""), ("/", ""), ("/x/", "/x")]
)
def test_below_a_root_path(folder: Path, root_path: str, path: str) -> None:
    """Of `--root-path`; a proxy may have taken it off."""
    asked = watch(folder, Engine(), BODY, f"{path}/v1/completions", root_path=root_path)
    _, events, _ = asyncio.run(asked)
    assert len(events) == 2


def test_the_id_is_the_clients_own(folder: Path) -> None:
    header = (b"X-Request-Id", b"mine")
    path = "/v1/chat/completions"
    _, events, _ = asyncio.run(watch(folder, Engine(), BODY, path, header))
    assert {e["id"] for e in events} == {"chatcmpl-mine"}
    _, events, _ = asyncio.run(watch(folder, Engine(), BODY | {"request_id": "named"}))
    assert {e["id"] for e in events} == {"cmpl-named"}


@pytest.mark.parametrize(
    ("asked", "model"), [({"model": "m"}, "m"), ({"model": None}, "served"), ({}, "served")]
)
def test_the_model_of_a_request_that_names_none(
    folder: Path, asked: dict[str, Any], model: str
) -> None:
    """vLLM's own chunks name the model that is served."""
    body = {key: value for key, value in BODY.items() if key != "model"} | asked
    _, events, _ = asyncio.run(watch(folder, Engine(), body))
    assert {e["model"] for e in events} == {model}


def test_each_sees_its_own(folder: Path) -> None:
    async def both() -> None:
        hub = CanvasHub(folder)
        engines = [Engine(num_canvases=n) for n in (1, 2)]
        source = hub, lambda tokens: [""] * len(tokens), "served"
        body = json.dumps(BODY).encode()
        answers = await asyncio.gather(
            *(ask(CanvasStreams(engine, lambda: source), body) for engine in engines)
        )
        await hub.close()
        assert [answer.count(b'"step"') for _, answer in answers] == [1, 2]

    asyncio.run(both())


@pytest.mark.parametrize(
    "body",
    [
        BODY | {"vllm_xargs": {"diffusion_max_steps": 4}},
        BODY | {"vllm_xargs": {STREAM_CANVASES: False}},
        BODY | {"vllm_xargs": {STREAM_CANVASES: "yes"}},
        BODY | {"vllm_xargs": [STREAM_CANVASES]},
        BODY | {"vllm_xargs": None, "prompt": STREAM_CANVASES},
    ],
    ids=["without the key", "off", "wrong", "no object", "elsewhere"],
)
def test_others_pass_as_they_are(folder: Path, body: dict[str, Any]) -> None:
    engine = Engine()
    _, events, answer = asyncio.run(watch(folder, engine, body))
    assert engine.body == body and b"x-request-id" not in engine.headers
    assert not events and answer.count(b"data: ") == 2
    assert not list(folder.iterdir()), "nobody listens"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000], ids=["cut short", "deep"])
def test_what_is_no_json_is_left_to_vllm(body: bytes) -> None:
    assert parse_watched_request("/v1/completions", [], body + STREAM_CANVASES.encode()) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stream": False}, "needs a stream, got stream = False. Set stream to true"),
        ({"n": 2}, "shows one answer, got n = 2"),
        ({"prompt": ["a", "b"]}, "shows one answer, got 2 prompts"),
        ({"prompt": [[1], [2]]}, "shows one answer, got 2 prompts"),
    ],
)
def test_refused(folder: Path, change: dict[str, Any], complaint: str) -> None:
    engine = Engine()
    status, _, answer = asyncio.run(watch(folder, engine, BODY | change))
    assert status == 400 and not engine.body
    assert complaint in json.loads(answer)["error"]["message"]


def test_an_error_stays_as_it_is(folder: Path) -> None:
    status, events, answer = asyncio.run(watch(folder, Engine(status=400), BODY))
    assert status == 400 and not events
    assert answer == b'data: {"id": "x"}\n\ndata: [DONE]\n\n'


def test_a_client_that_leaves(folder: Path) -> None:

    async def check() -> None:
        hub = CanvasHub(folder)
        waits = asyncio.Event()

        async def engine(scope: Any, receive: Any, send: Any) -> None:
            waits.set()
            await asyncio.Event().wait()

        app = CanvasStreams(engine, lambda: (hub, lambda tokens: [], "served"))
        task = asyncio.create_task(ask(app, json.dumps(BODY).encode()))
        await waits.wait()
        assert len(hub._feeds) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not hub._feeds
        await hub.close()

    asyncio.run(check())


ANSWER = (
    b'data: {"text": "a"}\n\n',
    b": keep-alive\n\n",
    b'data: {"text": "said \\n\\ndata: [DONE] twice"}\n\n',
    b"data: [DONE]\n\n",
)


def canvas(step: int, finished: bool = False, start: int = 0) -> dict[str, Any]:
    return {"step": step, "finished": finished, "start": start}


def event(of: dict[str, Any]) -> bytes:
    return f"data: canvas {of['step']}\n\n".encode()


def events(sent: list[bytes]) -> list[bytes]:
    return [one + b"\n\n" for one in b"".join(sent).split(b"\n\n")[:-1]]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def interleaved(feed: Feed, sent: list[bytes], grace_s: float = 0.0) -> InterleavedStream:
    async def send(data: bytes) -> None:
        sent.append(data)

    return InterleavedStream(send, feed, event, grace_s)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
async def test_wherever_the_stream_is_cut(size: int) -> None:
    sent: list[bytes] = []
    feed = Feed("any")
    stream = interleaved(feed, sent)
    stream.start()
    whole = b"".join(ANSWER)
    for i in range(0, len(whole), size):
        feed.put_canvas(canvas(i))
        await settle()
        await stream.forward(whole[i : i + size])
    await stream.end()
    feed.put_canvas(canvas(-1))
    await settle()
    await stream.close()
    found = events(sent)
    assert [one for one in found if not one.startswith(b"data: canvas")] == list(ANSWER)
    steps = [int(one.split()[-1]) for one in found if one.startswith(b"data: canvas")]
    assert steps == list(range(0, len(whole), size))
    assert found[-1] == ANSWER[-1]


def test_blocks_are_counted() -> None:
    """Wherever they begin: a verified draft may end anywhere. A preempted one comes again."""
    feed = Feed("any")
    for start in (5, 5, 7, 8, 8, 7, 16):
        feed.put_canvas(canvas(1, start=start))
    found = [feed.take_canvas() for _ in range(7)]
    assert [one and one["block"] for one in found] == [0, 0, 1, 2, 2, 1, 3]


async def test_the_end_waits_for_the_last_canvases() -> None:
    sent: list[bytes] = []
    feed = Feed("any")
    stream = interleaved(feed, sent, grace_s=60)
    stream.start()
    feed.put_canvas(canvas(1, finished=True))
    feed.end()  # of a request that is preempted
    feed.put_canvas(canvas(2))
    end = asyncio.create_task(stream.forward(b"".join(ANSWER)))
    await settle()
    assert not end.done()
    feed.put_canvas(canvas(3, finished=True))
    feed.end()
    await end
    await stream.close()
    assert events(sent)[-2:] == [event(canvas(3)), ANSWER[3]]


async def test_a_stream_without_an_end_mark() -> None:
    sent: list[bytes] = []
    feed = Feed("any")
    stream = interleaved(feed, sent)
    await stream.forward(b"data: part")
    feed.put_canvas(canvas(1))
    await stream.end()
    assert sent == [event(canvas(1)), b"data: part"]


async def test_a_slow_client_misses_the_oldest_canvases_and_nothing_of_the_answer() -> None:
    sent: list[bytes] = []
    may_send = asyncio.Event()

    async def send(data: bytes) -> None:
        await may_send.wait()
        sent.append(data)

    feed = Feed("any")
    stream = InterleavedStream(send, feed, event, 0.0)
    stream.start()
    feed.put_canvas(canvas(0))
    await settle()  # the first is on its way
    answer = asyncio.create_task(stream.forward(b"".join(ANSWER)))
    for step in range(1, 100):
        feed.put_canvas(canvas(step, finished=step == 99))
    may_send.set()
    await answer
    await stream.close()
    found = events(sent)
    assert [one for one in found if not one.startswith(b"data: canvas")] == list(ANSWER)
    steps = [int(one.split()[-1]) for one in found if one.startswith(b"data: canvas")]
    assert steps == [0, *range(100 - BUFFER_CANVASES, 100)]


async def test_nothing_is_sent_to_who_has_left() -> None:
    async def send(data: bytes) -> None:
        raise OSError("gone")

    feed = Feed("any")
    stream = InterleavedStream(send, feed, event, 0.0)
    stream.start()
    feed.put_canvas(canvas(1))
    await settle()
    with pytest.raises(OSError, match="gone"):
        await stream.forward(ANSWER[0])
    await stream.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
