"""Ranks whose steps differ in size: what each gathers and gets back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

from tests.patched import patched
from vllm_dllm.cpu.compat import platform_classes

SIZES = [3, 0, 5]
WIDTH = 4


def rows_of(rank: int, size: int) -> torch.Tensor:
    return torch.arange(size * WIDTH, dtype=torch.float32).view(size, WIDTH) + 100 * rank


def ranks(rank: int, size: int = len(SIZES)) -> Any:
    """The communicator of one of them."""
    found = platform_classes.UnevenCpuCommunicator.__new__(platform_classes.UnevenCpuCommunicator)
    found.world_size, found.rank_in_group, found.device_group = size, rank, None
    return found


def run_rank(rank: int, store: str) -> None:
    """One process: what its layer of experts asks for, and what it must get."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(SIZES)
    )
    communicator = ranks(rank)
    rows = rows_of(rank, SIZES[rank])
    ids = torch.full((SIZES[rank],), rank)
    everyone = torch.cat([rows_of(other, size) for other, size in enumerate(SIZES)])

    gathered, gathered_ids = communicator.all_gatherv([rows, ids], sizes=SIZES)
    torch.testing.assert_close(gathered, everyone, rtol=0, atol=0)
    assert gathered_ids.tolist() == [r for r, size in enumerate(SIZES) for _ in range(size)]

    # Each rank has computed a share of every row's sum.
    partial = everyone * (rank + 1)
    own = communicator.reduce_scatterv(partial, sizes=SIZES)
    torch.testing.assert_close(own, rows * sum(range(1, len(SIZES) + 1)), rtol=0, atol=0)
    torch.testing.assert_close(partial, everyone * (rank + 1), rtol=0, atol=0)  # as it was
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_uneven_rows(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    torch.multiprocessing.spawn(run_rank, args=(store,), nprocs=len(SIZES))


def test_the_platform_names_it() -> None:
    with patched("platforms.cpu:CpuPlatform.get_device_communicator_cls"):
        platform_classes.use_uneven_communicator()
        path = CpuPlatform.get_device_communicator_cls()
        assert resolve_obj_by_qualname(path) is platform_classes.UnevenCpuCommunicator


def test_nothing_is_gathered() -> None:
    """vLLM's own ends the process with SIGFPE."""
    gathered = []

    def gather(output: torch.Tensor, input: torch.Tensor, group: object = None) -> None:
        gathered.append(tuple(input.shape))

    communicator = ranks(0, size=2)
    communicator.dist_module = SimpleNamespace(all_gather_into_tensor=gather)
    assert communicator.all_gather(torch.zeros(0, 3)).shape == (0, 6)
    assert gathered == []
    assert communicator.all_gather(torch.zeros(2, 3)).shape == (2, 6)
    assert gathered == [(2, 3)]


def test_other_dimensions_are_refused() -> None:
    for exchange in (ranks(0).all_gatherv, ranks(0).reduce_scatterv):
        with pytest.raises(ValueError, match="dim=1"):
            exchange(torch.zeros(2, 2), dim=1)
