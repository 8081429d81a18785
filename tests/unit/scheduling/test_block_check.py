"""Steps of canvases ask for no masks of grammars, and wait for no tokens because of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_dllm.scheduling.fair_share import FairShare
from vllm_dllm.scheduling.scheduler import (
    CanvasAsyncScheduler,
    CanvasScheduler,
    CanvasScheduling,
)


@pytest.mark.parametrize("scheduler_cls", [CanvasScheduler, CanvasAsyncScheduler])
def test_no_step_waits_for_tokens_that_a_grammar_needs(
    scheduler_cls: type[CanvasScheduling], monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(self: Scheduler, *args: Any) -> Any:
        return SimpleNamespace(
            has_structured_output_requests=True, pending_structured_output_tokens=True
        )

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    scheduler: Any = object.__new__(scheduler_cls)
    scheduler.running, scheduler.waiting, scheduler.current_step = [], [], 0
    scheduler.lora_config = None
    scheduler.fair_share = FairShare(2, 4)
    scheduler.structured_output_manager = "vLLM's"
    scheduler.set_block_check(lambda manager: f"ours, of {manager}")
    output = scheduler.schedule()
    assert scheduler.structured_output_manager == "ours, of vLLM's"
    assert not output.has_structured_output_requests
    assert not output.pending_structured_output_tokens
