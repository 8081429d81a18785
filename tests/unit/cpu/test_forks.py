"""Which processes fork, and the cores of a forked worker."""

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor import multiproc_executor

from tests.patched import patched
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import fork_server, install
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat import engine_processes


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_server, "ensure_running", lambda imports: None)
    with patched("v1.executor.multiproc_executor:get_mp_context"):
        yield


def config(worker_cls: str = CPU_WORKER, numa_bind: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker_cls, numa_bind=numa_bind)
    )


def test_engines_of_our_workers_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "find_fork_obstacle", lambda: None)
    assert install._fork_context(config()) is fork_server.ForkContext
    assert install._fork_context(config("vllm.v1.worker.cpu_worker.CPUWorker")) is None
    assert install._fork_context(config(numa_bind=True)) is None


def test_what_stands_in_the_way_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "find_fork_obstacle", lambda: "OMP_NUM_THREADS changed")
    with caplog.at_level(logging.INFO, "vllm_dllm"):
        assert install._fork_context(config()) is None
    assert "because OMP_NUM_THREADS changed" in caplog.text


@pytest.mark.parametrize(("num_cores", "fork"), [(2, True), (8, True), (9, False)])
def test_workers_fork_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, fork: bool
) -> None:
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    monkeypatch.setattr(cpu_cores, "available_cpu_count", lambda: num_cores)
    install.fork_processes()
    assert (multiproc_executor.get_mp_context is fork_server.ForkContext) == fork


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GOMP_CPU_AFFINITY": "0 1"}, [0, 1]),
        ({"OMP_PLACES": "{3,5}"}, [3, 5]),
        ({"GOMP_CPU_AFFINITY": "0 1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, []),
        ({}, []),
    ],
)
def test_the_cores_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[int]
) -> None:
    for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert engine_processes.worker_cores() == expected


def test_a_forked_worker_computes_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(engine_processes, "worker_cores", lambda: [0, 1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(install.cores, "set_num_threads", found.append)
    install.compute_on_chosen_cores()
    assert found == []  # this process was not forked
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    install.compute_on_chosen_cores()
    assert found == [[0, 1], 2]


def test_cores_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    there = sorted(os.sched_getaffinity(0))
    for wrong in ([4000], [*there, 4000]):
        monkeypatch.setattr(engine_processes, "worker_cores", lambda wrong=wrong: wrong)
        with pytest.raises(ValueError, match="VLLM_CPU_OMP_THREADS_BIND must name cores") as error:
            install.compute_on_chosen_cores()
        assert f"among {there}, got {wrong}." in str(error.value)
