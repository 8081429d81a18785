"""Which cores the model gets, how many threads a step, and how an engine and its workers wait
for each other."""

import logging
import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils import ompmultiprocessing
from vllm.utils.cpu_resource_utils import LogicalCPUInfo
from vllm.v1.executor import multiproc_executor

from tests.patched import patched
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import cores
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat.cores import shorten_busy_wait
from vllm_dllm.cpu.compat.runner import STOCK_CPU_WORKER
from vllm_dllm.cpu.cores import MIN_WORK, StepThreads

USER = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("num_cores", "usable", "wish", "used"),
    [
        *[(n, n, None, n) for n in (1, 2, 8)],
        *[(9, 9, None, 8), (64, 64, None, 63)],
        *[(64, 4, None, 4), (2, 1, None, 1)],
        *[(8, 8, "1", 1), (12, 8, "12", 12), (8, 8, " 3,1", 3)],
        *[(8, 8, "", 8), (8, 8, "x", 8)],
    ],
)
def test_a_small_machine_gives_all_within_its_quota_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, usable: int, wish: str | None, used: int
) -> None:
    monkeypatch.setattr(cpu_cores, "available_cpu_count", lambda: usable)
    if wish is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wish)
    assert cores.choose_cores([list(range(num_cores))]) == [list(range(used))]


def test_workers_share_a_quota(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_cores, "available_cpu_count", lambda: 4)
    with caplog.at_level(logging.INFO, "vllm_dllm"):
        assert cores.choose_cores([[0, 1, 2, 3], [4, 5, 6, 7]]) == [[0, 1], [4, 5]]
    (record,) = caplog.records
    assert "computes on core 0, 1; 4, 5;" in record.getMessage()


def given(
    monkeypatch: pytest.MonkeyPatch,
    worker: str = CPU_WORKER,
    kv_transfer: object = None,
    num_cores: int = 2,
    num_workers: int = 1,
) -> tuple[list[list[int]], list[int]]:
    """The cores that vLLM gives its worker on a machine, and those it reserves."""
    found = [LogicalCPUInfo(id=i, physical_core=i, numa_node=0) for i in range(num_cores)]
    utils = ompmultiprocessing.cr_utils
    monkeypatch.setattr(utils, "get_allowed_cpu_list", lambda *_: found)
    monkeypatch.setattr(utils, "get_visible_memory_node", lambda *_: [0])
    monkeypatch.setattr(cpu_cores, "available_cpu_count", lambda: num_cores)
    parallel = SimpleNamespace(
        worker_cls=worker,
        local_world_size=num_workers,
        data_parallel_rank_local=None,
        assigned_physical_gpu_ids=None,  # vLLM 0.33 asks
        _api_process_count=1,
    )
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=kv_transfer)
    with patched("v1.executor.multiproc_executor:OMPProcessManager"):
        cpu_cores.set_core_choice(cores.choose_cores, CPU_WORKER)
        manager = multiproc_executor.OMPProcessManager(config)
    return manager.cpu_lists, manager.reserved_cpu_list


@pytest.mark.parametrize(
    ("variables", "machine", "expected"),
    [
        ({}, {}, ([[0, 1]], [])),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, {}, ([[0]], [1])),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, {}, ([[0, 1]], [])),
        ({"VLLM_CPU_OMP_THREADS_BIND": "1"}, {}, ([[1]], [])),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, {}, ([], [])),
        ({"OMP_NUM_THREADS": "1"}, {}, ([[0]], [1])),
        # Others keep vLLM's choice.
        ({}, {"worker": STOCK_CPU_WORKER}, ([[0]], [1])),
        ({}, {"kv_transfer": object(), "num_cores": 4}, ([[0, 1]], [2, 3])),
        # Workers share a memory node. vLLM refuses them: "Not enough allowed NUMA nodes".
        ({}, {"num_workers": 2}, ([[0], [1]], [])),
        ({}, {"num_workers": 2, "num_cores": 5}, ([[0, 1], [2, 3]], [])),
        ({}, {"num_workers": 2, "num_cores": 1}, ([[0], [0]], [])),
    ],
)
def test_the_cores_of_workers(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], machine: Any, expected: object
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert given(monkeypatch, **machine) == expected


def test_workers_are_spread_over_memory_nodes() -> None:
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cpu_cores.split_node_cores(nodes, 3) == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_small_steps_run_on_one_thread() -> None:
    used: list[int] = []
    threads = StepThreads(MIN_WORK // 1000, most=4, set_num_threads=used.append)
    for num_rows in (999, 64, 1000, 5000, 1):
        threads.set_for_step(num_rows)
    assert used == [1, 4, 1]  # set when it changes


def test_one_row_of_a_large_model_runs_on_all() -> None:
    """Reading its weights is work enough."""
    used: list[int] = []
    StepThreads(MIN_WORK // 20, most=2, set_num_threads=used.append).set_for_step(1)
    assert used == []


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
