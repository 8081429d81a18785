"""Requests in flight when a server is told to stop, without a server."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.compat import ending


class Processor:
    """vLLM's, as far as its requests are asked for."""

    def __init__(self, names: list[str]) -> None:
        self.request_states = dict.fromkeys(names)
        self.errors: list[Exception] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def propagate_error(self, error: Exception) -> None:
        self.errors += [error] * len(self.request_states)


@pytest.mark.parametrize("finish", [True, False], ids=["finish", "take too long"])
@pytest.mark.parametrize("shares_engine", [False, True], ids=["one server", "several"])
def test_requests_in_flight(
    finish: bool, shares_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(ending, "_kill_after", limits.append)
    processor, aborted = Processor(["a", "b"]), []

    async def serve() -> None:
        async def abort(names: list[str], internal: bool) -> None:
            aborted.extend(names)

        manager = None if shares_engine else object()
        engine: Any = SimpleNamespace(
            engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)),
            output_processor=processor,
            output_handler=asyncio.current_task(),
            errored=False,
            abort=abort,
        )
        if finish:
            threading.Timer(0.1, processor.request_states.clear).start()
        limit = 600.0 if finish else (4.2 if shares_engine else 0.2)
        await asyncio.to_thread(ending._stop_requests, engine, limit)
        own_time = limit - (4 if shares_engine else 0)
        assert limits == [pytest.approx(own_time + ending.ALL_S)]

    asyncio.run(serve())
    assert aborted == ([] if finish else ["a", "b"])
    assert len(processor.errors) == len(aborted)
    for error in processor.errors:
        assert isinstance(error, ending.ServerStopping)
        assert error.http_status == error.status_code == 503


def test_a_start_is_not_touched_where_nothing_starts() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    ending.limit_interrupted_start()
    assert signal.getsignal(signal.SIGTERM) == before
