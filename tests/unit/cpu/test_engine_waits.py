"""How an engine and its workers wait for each other."""

import multiprocessing
import time
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_dllm.cpu.compat.cores import shorten_busy_wait


def answer_pairs(asked: Any, handles: Any, count: int) -> None:
    shorten_busy_wait()
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


@pytest.mark.slow
def test_no_message_is_missed() -> None:
    """Of two in a row, the second wakes nobody; so readers must not be asleep by then."""
    shorten_busy_wait()
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
