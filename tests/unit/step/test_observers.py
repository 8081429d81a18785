"""Who looks at a step's canvases sees those it asked for; where nobody looks, nothing happens."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from tests.processes import HANGS_S
from tests.unit.config.test_files import room_for
from tests.unit.step.batches import canvas_batch
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.canvas_feeds import unpack_canvases
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.watched import observers
from vllm_dllm.step.watched.canvas_sender import StepCanvases
from vllm_dllm.step.watched.observers import CanvasObservers

C = 4
CPU = torch.device("cpu")


@pytest.fixture
def listener(folder: Path) -> Any:
    """An API process' socket, and its name."""
    name = canvas_feeds.new_random_name()
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set(zmq.RCVTIMEO, int(HANGS_S * 1000))
        socket.bind(f"ipc://{folder / name}")
        yield socket, name


def observing(trace: Path | None = None, **options: Any) -> CanvasObservers:
    return CanvasObservers(str(trace) if trace else None, CPU, **({"speaks": True} | options))


def request(slot: int, feed: str | None) -> Any:
    return SimpleNamespace(slot=slot, options=SimpleNamespace(canvas_feed=feed))


def batch(*slots: int) -> CanvasBatch:
    """Canvases of C positions, the last one a position shorter."""
    return canvas_batch(C, [*[C] * (len(slots) - 1), C - 1], slots)


def step(n: int, number: int = 1, start: int = 3) -> StepCanvases:
    """Canvas i holds 10i, 10i + 1, ...; the first one commits if there are several."""
    tokens = torch.arange(C) + 10 * torch.arange(n)[:, None]
    denoises = torch.ones(n, dtype=torch.bool)
    denoises[0] = n == 1
    return StepCanvases(
        *(tokens, tokens % 2 == 0, tokens + 100, tokens / 8),
        *(torch.full((n,), number), torch.full((n,), 0.75), torch.full((n,), start)),
        torch.tensor([*[C] * (n - 1), C - 1]),
        *(denoises, torch.ones(n, dtype=torch.bool)),
    )


def received(socket: Any) -> tuple[bytes, dict[str, Any] | None]:
    """The only canvas of a message."""
    (found,) = unpack_canvases(socket.recv())
    return found


def test_a_client_sees_its_own_canvas(listener: Any) -> None:
    socket, name = listener
    watching = observing()
    topic = canvas_feeds.new_random_name()
    watching.add_request(request(7, f"{name}/{topic}"))
    watching.add_request(request(5, None))
    assert watching.are_watching(batch(4, 5, 7)) and not watching.are_watching(batch(4, 5))
    canvases = step(3, number=2, start=3 + C)
    watching.show_step(canvases, batch(4, 5, 7), ["a", "b", "c"])
    canvases.tokens.zero_()  # as later steps do
    assert received(socket) == (
        topic.encode(),
        {
            "start": 3 + C,
            "step": 2,
            "finished": True,
            "temperature": 0.75,
            "mean_entropy": round((20 + 21 + 22) / 24, 4),
            "tokens": [20, 21, 22],
            "accepted": [1, 0, 1],
            "entropy": [2.5, 2.625, 2.75],
        },
    )
    watching.remove_request(7)
    assert not watching.are_watching(batch(4, 5, 7))
    assert received(socket) == (topic.encode(), None), "the end"


def test_a_step_is_one_message_for_each_process(listener: Any) -> None:
    socket, name = listener
    other = canvas_feeds.new_random_name()
    topics = [canvas_feeds.new_random_name() for _ in range(5)]
    watching = observing()
    with zmq.Context() as context, context.socket(zmq.PULL) as second:
        second.set(zmq.RCVTIMEO, int(HANGS_S * 1000))
        second.bind(f"ipc://{Path(canvas_feeds.socket_folder() or '') / other}")
        for slot, topic in enumerate(topics):
            watching.add_request(request(slot, f"{other if slot == 3 else name}/{topic}"))
        watching.show_step(step(5), batch(*range(5)), list("abcde"))
        watching.remove_request(0)
        found = [
            (t.decode(), c["tokens"]) for t, c in unpack_canvases(socket.recv()) if c is not None
        ]
        # The first one commits, and shows nothing.
        assert found == [
            (topics[1], [10, 11, 12, 13]),
            (topics[2], [20, 21, 22, 23]),
            (topics[4], [40, 41, 42]),
        ]
        assert received(second)[0] == topics[3].encode()
        assert received(socket) == (topics[0].encode(), None), "no other message came before"


@pytest.mark.parametrize(
    "feed", ["", "a/b", "../" + "0" * 29 + "/" + "0" * 32, "0" * 32 + "/" + "0" * 32, "0" * 65]
)
def test_names_that_lead_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch, feed: str) -> None:
    monkeypatch.setattr(observers, "CanvasSender", lambda: pytest.fail("a thread"))
    (folder / ("1" * 32)).touch()
    watching = observing()
    for name in (feed, "1" * 32 + "/" + "0" * 32):
        watching.add_request(request(0, name))
        watching.show_step(step(1), batch(0), ["a"])


def test_of_several_workers_one_speaks(
    listener: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them know, and so run the same kernels."""
    monkeypatch.setattr(observers, "CanvasSender", lambda: pytest.fail("a thread"))
    trace = tmp_path / "trace.jsonl"
    traces, watches = observing(trace, speaks=False), observing(speaks=False)
    watches.add_request(request(0, f"{listener[1]}/{canvas_feeds.new_random_name()}"))
    for silent in (traces, watches):
        assert silent.are_watching(batch(0, 1))
        silent.show_step(step(1), batch(0), ["a"])
    assert not watches.are_watching(batch(1)) and not trace.exists()
    watches.remove_request(0)
    assert not watches.are_watching(batch(0))


def test_a_reader_that_stands_still_holds_up_nobody(
    listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket fills up, and the thread goes on to who reads."""
    _, name = listener
    other = canvas_feeds.new_random_name()
    monkeypatch.setattr("vllm_dllm.step.watched.canvas_sender.SOCKET_MESSAGES", 1)
    watching = observing()
    watching.add_request(request(0, f"{name}/{canvas_feeds.new_random_name()}"))
    with zmq.Context() as context, context.socket(zmq.PULL) as reading:
        reading.set(zmq.RCVTIMEO, int(HANGS_S * 1000))
        reading.bind(f"ipc://{Path(canvas_feeds.socket_folder() or '') / other}")
        watching.add_request(request(1, f"{other}/{canvas_feeds.new_random_name()}"))
        for number in range(2000):
            watching.show_step(step(1, number), batch(0), ["a"])
        watching.show_step(step(1, 5000), batch(1), ["b"])
        assert received(reading)[1]["step"] == 5000


def test_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "CanvasSender", lambda: pytest.fail("a thread"))
    watching = observing()
    watching.add_request(request(0, None))
    assert not watching.are_watching(batch(0))


def test_trace_and_stream_show_the_same(listener: Any, tmp_path: Path) -> None:
    socket, name = listener
    trace = tmp_path / "trace.jsonl"
    watching = observing(trace)
    watching.add_request(request(1, f"{name}/{canvas_feeds.new_random_name()}"))
    assert watching.are_watching(batch(0))
    watching.show_step(step(3), batch(0, 1, 2), ["a", "b", "c"])
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["b", "c"]
    assert lines[1]["tokens"] == [20, 21, 22] and lines[1]["canvas"] == [120, 121, 122]
    streamed = received(socket)[1]
    for field in ("step", "tokens", "accepted", "finished"):
        assert streamed[field] == lines[0][field]


def test_a_full_disk_costs_lines_of_the_trace(
    tmp_path: Path, logged: Callable[..., list[str]]
) -> None:
    warnings = logged(observers)
    path = tmp_path / "trace.jsonl"
    watching = observing(path)
    watching.show_step(step(1), batch(0), ["before"])
    with room_for(path.stat().st_size + 20):  # of a line that is longer
        for _ in range(3):
            watching.show_step(step(1), batch(0), ["lost"])
    watching.show_step(step(1), batch(0), ["after"])
    kept = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
    assert kept == ["before", "after"]
    assert warnings == [
        f"A line of the trace was dropped, and more may follow: cannot write to {path}: File too "
        f"large."
    ]
