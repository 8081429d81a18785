"""The KV cache of a CPU is as large as requests can fill, unless the user says otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dllm.cpu import cache_size
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
FILLABLE = cache_size.ROOM * REQUESTS * (FULL_BYTES + SLIDING_BYTES)
GIB = 1 << 30


@pytest.fixture
def no_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "LEAST_BYTES", 0)


def config() -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=IN_FLIGHT,
    )


@pytest.mark.usefixtures("no_least")
def test_twice_what_all_requests_fill() -> None:
    assert cache_size.cache_bytes(GIB, LAYERS, config()) == FILLABLE


def test_few_requests_leave_room_for_prefixes() -> None:
    assert cache_size.cache_bytes(2 * GIB, LAYERS, config()) == cache_size.LEAST_BYTES


@pytest.mark.parametrize("available", [FILLABLE - 1, GIB - 1])
def test_never_more_than_there_is(available: int) -> None:
    assert cache_size.cache_bytes(available, LAYERS, config()) == available


def test_a_model_without_a_cache_keeps_what_vllm_says() -> None:
    assert cache_size.cache_bytes(GIB, {}, config()) == GIB


@pytest.mark.usefixtures("no_least")
@pytest.mark.parametrize(("asked", "given"), [(None, FILLABLE), (GIB, GIB)], ids=["open", "set"])
def test_the_users_size_stays(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, given: int
) -> None:
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda worker: GIB)
    monkeypatch.setattr(CPUWorker, "get_kv_cache_spec", lambda worker: LAYERS)
    worker = TritonFreeCPUWorker.__new__(TritonFreeCPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked)
    worker.vllm_config = config()
    assert worker.determine_available_memory() == given
