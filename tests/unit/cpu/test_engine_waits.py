"""How an engine and its workers wait for each other."""

import multiprocessing
import time
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from vllm_dllm.cpu import forks, install
from vllm_dllm.cpu.compat import engine_waits, runner, triton

SECOND = 1.0  # for how long vLLM's readers stay awake


@pytest.fixture
def stock_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, is_reader: bool) -> None:
        self.busy_loop_s = SECOND if is_reader else 0.0

    monkeypatch.setattr(SpinCondition, "__init__", init)


@pytest.mark.parametrize(("num_cores", "seconds"), [(2, 0.02), (8, 0.02), (9, SECOND)])
def test_readers_fall_asleep_soon_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, stock_readers: None, num_cores: int, seconds: float
) -> None:
    monkeypatch.setattr(triton, "has_triton", lambda: False)
    monkeypatch.setattr(runner, "allow_v2_runner_without_triton", lambda prepare: None)
    monkeypatch.setattr(forks, "install", lambda: None)
    monkeypatch.setattr(install, "available_cpu_count", lambda: num_cores)
    for _ in range(2):
        install.install()
    assert SpinCondition(is_reader=True).busy_loop_s == seconds
    assert SpinCondition(is_reader=False).busy_loop_s == 0


def answer_pairs(asked: Any, handles: Any, count: int) -> None:
    engine_waits.fall_asleep_soon()
    questions = MessageQueue.create_from_handle(asked, 0)
    answers = MessageQueue(1, 1)
    handles.send(answers.export_handle())
    questions.wait_until_ready()
    answers.wait_until_ready()
    for _ in range(count):
        first, second = questions.dequeue(), questions.dequeue()
        time.sleep(second)  # longer than readers stay awake, or not
        answers.enqueue(first)
        answers.enqueue(second)


def test_no_message_is_missed() -> None:
    """Of two in a row, the second wakes nobody; so readers must not be asleep by then."""
    engine_waits.fall_asleep_soon()
    pauses = [0.0, 0.001, 0.03, 0.06] * 20
    questions = MessageQueue(1, 1)
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    worker = spawn.Process(
        target=answer_pairs, args=(questions.export_handle(), there, len(pauses)), daemon=True
    )
    worker.start()
    answers = MessageQueue.create_from_handle(here.recv(), 0)
    questions.wait_until_ready()
    answers.wait_until_ready()
    for number, pause in enumerate(pauses):
        questions.enqueue(number)
        questions.enqueue(pause)
        # A message that wakes nobody is found after five seconds.
        found = [answers.dequeue(timeout=4.0) for _ in range(2)]
        assert found == [number, pause]
    worker.join()
    assert worker.exitcode == 0
