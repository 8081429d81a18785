"""What drafters do on ranks of pipeline and data parallelism, and GPU workers with a trainer's
weights."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_dllm.compat.dflash import DFlashHooks
from vllm_dllm.compat.drafting import send_widths_to_speculator
from vllm_dllm.drafters.dflash import WidthDFlashSpeculator
from vllm_dllm.drafters.worker import DraftWorker
from vllm_dllm.quantization.complete_weights import must_be_complete
from vllm_dllm.step.runner.worker import CanvasWorker


def test_only_the_last_stage_has_a_speculator() -> None:
    begun: list[Any] = []
    step = SimpleNamespace(draft_widths={"a": 3})
    for speculator in (None, SimpleNamespace(step_begins=lambda *of_step: begun.append(of_step))):
        send_widths_to_speculator(SimpleNamespace(speculator=speculator), step)
    assert begun == [(step, {"a": 3})]


def test_widths_are_predicted_under_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the steps without requests, with which a rank waits for the others."""
    asked: list[Any] = []
    monkeypatch.setattr(DFlashHooks, "propose", lambda *_, dummy_run, **__: "drafts")
    monkeypatch.setattr(
        WidthDFlashSpeculator, "_predict_widths", lambda self, *of_step: asked.append(of_step)
    )
    speculator = object.__new__(WidthDFlashSpeculator)
    speculator.dp_size, speculator._predictor = 2, object()
    for dummy_run in (True, False):
        found = speculator.propose("batch", {}, {}, "states", None, None, dummy_run=dummy_run)
        assert found == "drafts"
    assert asked == [("batch", "states")]


@pytest.mark.parametrize("worker", [CanvasWorker, DraftWorker])
def test_a_trainers_weights_come_in_parts(
    monkeypatch: pytest.MonkeyPatch, worker: type[Worker]
) -> None:
    complete = []
    monkeypatch.setattr(Worker, "update_weights", lambda *_: complete.append(must_be_complete()))
    worker.update_weights(object.__new__(worker), {"names": []})
    assert complete == [False] and must_be_complete()
