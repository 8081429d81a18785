"""Ranks whose steps differ in size: what each gathers and gets back."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import (
    CpuCommunicator,
    _CPUSHMDistributed,
)

from vllm_dllm.compat import cpu_collectives

SIZES = [3, 0, 5]
WIDTH = 4


def rows_of(rank: int, size: int) -> torch.Tensor:
    return torch.arange(size * WIDTH, dtype=torch.float32).view(size, WIDTH) + 100 * rank


def run_rank(rank: int, store: str) -> None:
    """One process: what its layer of experts asks for, and what it must get."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(SIZES)
    )
    communicator = SimpleNamespace(world_size=len(SIZES), rank_in_group=rank, device_group=None)
    rows = rows_of(rank, SIZES[rank])
    ids = torch.full((SIZES[rank],), rank)
    everyone = torch.cat([rows_of(other, size) for other, size in enumerate(SIZES)])

    gathered, gathered_ids = cpu_collectives.all_gatherv(communicator, [rows, ids], sizes=SIZES)
    torch.testing.assert_close(gathered, everyone, rtol=0, atol=0)
    assert gathered_ids.tolist() == [r for r, size in enumerate(SIZES) for _ in range(size)]

    # Each rank has computed a share of every row's sum.
    partial = everyone * (rank + 1)
    own = cpu_collectives.reduce_scatterv(communicator, partial, sizes=SIZES)
    torch.testing.assert_close(own, rows * sum(range(1, len(SIZES) + 1)), rtol=0, atol=0)
    torch.testing.assert_close(partial, everyone * (rank + 1), rtol=0, atol=0)  # as it was
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_uneven_rows(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    torch.multiprocessing.spawn(run_rank, args=(store,), nprocs=len(SIZES))


@pytest.mark.parametrize("operation", ["all_gatherv", "reduce_scatterv"])
def test_vllms_communicator_has_them(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    # Whatever this process' other tests have installed: as vLLM defines it, none.
    stock = getattr(DeviceCommunicatorBase, operation)
    monkeypatch.setattr(CpuCommunicator, operation, stock, raising=False)
    cpu_collectives.exchange_uneven_steps()
    assert getattr(CpuCommunicator, operation) is getattr(cpu_collectives, operation)


def test_vllms_own_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later vLLM may bring its own."""

    def theirs(self: object) -> None: ...

    monkeypatch.setattr(CpuCommunicator, "all_gatherv", theirs, raising=False)
    cpu_collectives.exchange_uneven_steps()
    assert CpuCommunicator.all_gatherv is theirs


def test_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ends the process with SIGFPE."""
    gathered = []

    def gather(self: object, output: object, input: torch.Tensor, group: object = None) -> None:
        gathered.append(tuple(input.shape))

    monkeypatch.setattr(_CPUSHMDistributed, "all_gather_into_tensor", gather)
    for _ in range(2):
        cpu_collectives.gather_nothing()
    communicator = SimpleNamespace(
        world_size=2, device_group=None, dist_module=_CPUSHMDistributed.__new__(_CPUSHMDistributed)
    )
    assert CpuCommunicator.all_gather(communicator, torch.zeros(0, 3)).shape == (0, 6)
    assert gathered == []
    assert CpuCommunicator.all_gather(communicator, torch.zeros(2, 3)).shape == (2, 6)
    assert gathered == [(2, 3)]


def test_other_dimensions_are_refused() -> None:
    communicator = SimpleNamespace(world_size=2, rank_in_group=0, device_group=None)
    with pytest.raises(ValueError, match="dim=1"):
        cpu_collectives.all_gatherv(communicator, torch.zeros(2, 2), dim=1)
    with pytest.raises(ValueError, match="dim=1"):
        cpu_collectives.reduce_scatterv(communicator, torch.zeros(2, 2), dim=1)
