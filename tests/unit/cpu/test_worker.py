"""What a CPU's worker takes of its machine: cores, memory for its cache, and what it leaves to
vLLM."""

import logging
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CacheConfig, ParallelConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils import cpu_resource_utils, ompmultiprocessing
from vllm.utils.cpu_resource_utils import LogicalCPUInfo, MemoryNodeInfo
from vllm.v1.executor import multiproc_executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.patched import patched
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import cache_size, cores, worker
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat.cores import shorten_busy_wait
from vllm_dllm.cpu.compat.runner import STOCK_CPU_WORKER
from vllm_dllm.cpu.cores import MIN_WORK, StepThreads
from vllm_dllm.cpu.worker import TritonFreeCPUWorker

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


LENGTH, REQUESTS, BLOCK, WINDOW, IN_FLIGHT = 1000, 3, 16, 64, 128
SIZES: dict[str, Any] = dict(
    block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, head_size_v=32
)
BLOCK_BYTES = 2 * BLOCK * 2 * 32 * 4  # keys and values
LAYERS = {
    "full": FullAttentionSpec(**SIZES),
    "sliding": SlidingWindowSpec(**SIZES, sliding_window=WINDOW),
}
FULL_BYTES = 63 * BLOCK_BYTES  # blocks of 16 for 1,000 tokens
SLIDING_BYTES = 13 * BLOCK_BYTES  # for the window, a step, and a block that begins before both
FILLABLE = cache_size.CAPACITY_FACTOR * REQUESTS * (FULL_BYTES + SLIDING_BYTES)
GIB = 1 << 30


def config(**cache: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        model_config=SimpleNamespace(max_model_len=LENGTH, original_max_model_len=None),
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(**cache),
        max_in_flight_tokens=IN_FLIGHT,
    )


@pytest.mark.parametrize(
    ("available", "least", "layers", "chosen"),
    [
        pytest.param(GIB, 0, LAYERS, FILLABLE, id="twice what all requests fill"),
        pytest.param(2 * GIB, GIB, LAYERS, GIB, id="room for prefixes"),
        pytest.param(FILLABLE - 1, 0, LAYERS, FILLABLE - 1, id="not more than there is"),
        pytest.param(GIB - 1, GIB, LAYERS, GIB - 1, id="not more than there is for prefixes"),
        pytest.param(2 * GIB, GIB, {}, 2 * GIB, id="no cache: what vLLM says"),
    ],
)
def test_the_size(
    monkeypatch: pytest.MonkeyPatch, available: int, least: int, layers: Any, chosen: int
) -> None:
    monkeypatch.setattr(cache_size, "MIN_BYTES", least)
    assert cache_size.choose_cache_bytes(available, layers, config()) == chosen


def test_no_room_for_one_request() -> None:
    with pytest.raises(ValueError, match=r"of 1000 tokens needs 0\.59 MiB of KV"):
        cache_size.choose_cache_bytes(FULL_BYTES, LAYERS, config())


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> MemoryNodeInfo:
    """A machine of 24 GiB, and as much free as the test says, in vLLM's eyes and in ours."""
    node = MemoryNodeInfo(total_memory=24 * GIB, available_memory=18 * GIB)
    for module in (cpu_worker, cpu_resource_utils):
        monkeypatch.setattr(module, "get_memory_node_info", lambda node_id: node)
    for name in ("get_cgroup_memory_limit", "get_cgroup_memory_usage"):
        monkeypatch.setattr(cpu_resource_utils, name, lambda: None)
    return node


def started(monkeypatch: pytest.MonkeyPatch, **cache: Any) -> TritonFreeCPUWorker:
    """A worker that has loaded its model."""

    def init(worker: Any, vllm_config: Any, *args: object, **kwargs: object) -> None:
        worker.vllm_config, worker.cache_config = vllm_config, vllm_config.cache_config
        worker.parallel_config = vllm_config.parallel_config

    for name in ("end_with_parent", "allow_v2_worker_without_triton"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setattr(worker, "compute_on_chosen_cores", lambda: None)
    monkeypatch.setattr(torch.ops._C, "init_cpu_memory_env", lambda nodes: None, raising=False)
    monkeypatch.setattr(cpu_worker.Worker, "__init__", init)
    monkeypatch.setattr(TritonFreeCPUWorker, "get_kv_cache_spec", lambda worker: LAYERS)
    made = TritonFreeCPUWorker(config(**cache), 0, 0, "")
    made.model_runner = SimpleNamespace(warming_up_model=lambda: None)
    made.compilation_config = SimpleNamespace(mode=None)
    return made


@pytest.mark.parametrize(
    ("free", "asked", "least", "given"),
    [
        # vLLM wants 0.92 of the machine. What others take during the start does not matter either.
        pytest.param(2 * GIB, None, GIB, GIB, id="vLLM's share is not free"),
        pytest.param(GIB, None, GIB, int(0.92 * GIB), id="its share of what is free"),
        pytest.param(18 * GIB, None, 0, FILLABLE, id="what requests fill"),
        pytest.param(18 * GIB, GIB, 0, GIB, id="the user's size stays"),
    ],
)
def test_a_worker_takes(
    monkeypatch: pytest.MonkeyPatch,
    node: MemoryNodeInfo,
    free: int,
    asked: int | None,
    least: int,
    given: int,
) -> None:
    monkeypatch.setattr(cache_size, "MIN_BYTES", least)
    worker = started(monkeypatch, kv_cache_memory_bytes=asked)
    node.available_memory = free
    assert worker.determine_available_memory() == given


def test_a_named_share_that_the_model_fills(
    monkeypatch: pytest.MonkeyPatch, node: MemoryNodeInfo
) -> None:
    worker = started(monkeypatch, gpu_memory_utilization=0.001)
    with pytest.raises(ValueError, match=r"--gpu-memory-utilization 0\.001 leaves 0\.00 MiB"):
        worker.determine_available_memory()


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("size", "said"), [(10_000, r"is 0\.01 MiB\. "), (1 << 19, r"is 0\.50 MiB\. ")]
)
def test_a_named_size_without_room_for_one_request(
    monkeypatch: pytest.MonkeyPatch, size: int, said: str
) -> None:
    """vLLM says that 0.0 GiB are needed, and 0.0 available."""
    monkeypatch.setattr(cpu_worker.CPUWorker, "load_model", lambda worker: None)
    monkeypatch.setattr(worker, "restrict_prompt_logprobs", lambda runner: None)
    monkeypatch.setattr(worker.cores, "make_step_threads", lambda model, num_layers: None)
    made = started(monkeypatch, kv_cache_memory_bytes=size)
    made.model_runner = made.model_config = MagicMock()
    with pytest.raises(ValueError, match=r"needs 0\.59 MiB of KV .*" + said):
        made.load_model()


@pytest.mark.parametrize("folder", ["", "memory"], ids=["version-2", "version-1"])
def test_files_in_memory_give_way(
    monkeypatch: pytest.MonkeyPatch, node: MemoryNodeInfo, tmp_path: Path, folder: str
) -> None:
    """In a container whose limit is filled by files that it has read."""
    (tmp_path / folder).mkdir(exist_ok=True)
    stat = f"anon {GIB}\nactive_file {4 * GIB}\ninactive_file {18 * GIB}\ntotal_active_file 7\n"
    (tmp_path / folder / "memory.stat").write_text(stat)
    monkeypatch.setattr(cache_size, "CGROUP", tmp_path)
    for name, size in (("limit", 24 * GIB), ("usage", 23 * GIB)):
        monkeypatch.setattr(cpu_resource_utils, f"get_cgroup_memory_{name}", lambda size=size: size)
    everything = SimpleNamespace(available=100 * GIB)
    monkeypatch.setattr(cache_size.psutil, "virtual_memory", lambda: everything)
    node.available_memory = GIB
    assert cache_size.available_cache_bytes(CacheConfig(), 0) == int(0.92 * 23 * GIB)


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
