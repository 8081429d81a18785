"""Canvases come between a stream's events, however the stream is cut, and never after its end."""

import asyncio
from typing import Any

import pytest

from vllm_dllm.canvases.hub import BUFFER_CANVASES, Feed
from vllm_dllm.canvases.interleaving import InterleavedStream

ANSWER = (
    b'data: {"text": "a"}\n\n',
    b": keep-alive\n\n",
    b'data: {"text": "said \\n\\ndata: [DONE] twice"}\n\n',
    b"data: [DONE]\n\n",
)


def canvas(step: int, finished: bool = False) -> dict[str, Any]:
    return {"step": step, "finished": finished}


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
