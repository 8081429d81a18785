"""When the CPU worker samples without being asked."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.cpu.worker import TritonFreeCPUWorker

TOKENS, NOTHING_RAN = object(), object()


def run(monkeypatch: pytest.MonkeyPatch, ran: Any = None, **changes: bool) -> Any:
    """What the worker answers the engine that asks it to execute a step."""
    setting = {"is_diffusion": True, "async_scheduling": False, "structured": False, **changes}
    worker = TritonFreeCPUWorker.__new__(TritonFreeCPUWorker)
    worker.model_config = SimpleNamespace(is_diffusion=setting["is_diffusion"])
    worker.scheduler_config = SimpleNamespace(async_scheduling=setting["async_scheduling"])
    worker.model_runner = SimpleNamespace(sampler=None, speculator=None)
    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: ran)
    monkeypatch.setattr(CPUWorker, "sample_tokens", lambda *_: TOKENS)
    return worker.execute_model(
        SimpleNamespace(
            has_structured_output_requests=setting["structured"],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["known"]),
        )
    )


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, TOKENS),
        ({"ran": NOTHING_RAN}, NOTHING_RAN),
        # Otherwise the engine asks.
        ({"is_diffusion": False}, None),
        ({"async_scheduling": True}, None),
        ({"structured": True}, None),
    ],
    ids=["canvases", "nothing ran", "no diffusion", "asynchronous", "structured"],
)
def test_a_step_of_canvases_is_sampled_at_once(
    monkeypatch: pytest.MonkeyPatch, changes: Any, answer: object
) -> None:
    assert run(monkeypatch, **changes) is answer
