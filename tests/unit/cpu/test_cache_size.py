"""The KV cache of a CPU is as large as requests can fill, unless the user says otherwise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CacheConfig, ParallelConfig
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import MemoryNodeInfo
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker import cpu_worker

from vllm_dllm.cpu import cache_size, worker
from vllm_dllm.cpu.worker import TritonFreeCPUWorker

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
