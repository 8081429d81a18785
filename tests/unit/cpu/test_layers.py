"""Layers that CPUs compute by themselves: norms, adapters, verification of drafts, and what ranks
exchange."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from vllm import ir
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import punica_selector
from vllm.platforms import cpu, current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

from tests import tolerances
from tests.patched import patched
from tests.unit.cpu.kernel_inputs import kernel_of
from vllm_dllm.cpu import compilation
from vllm_dllm.cpu.compat import platform_classes
from vllm_dllm.cpu.compat.platform_classes import BatchedAdapters, use_batched_adapters
from vllm_dllm.cpu.verification import rejection_sample

current_platform.import_kernels()
compilation.register_cpp_norm()

LAYOUTS = {
    "rows": torch.randn(64, 128),
    "one-row": torch.randn(1, 96),
    "slice-of-qkv": torch.randn(64, 96)[:, 32:64].unflatten(-1, (1, 32)),
    "transposed": torch.randn(3, 4, 32).transpose(0, 1),
}


@pytest.mark.numerics
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_definition(name: str, weighted: bool) -> None:
    x = LAYOUTS[name]
    weight = torch.rand(x.shape[-1]) if weighted else None
    implementations = ir.ops.rms_norm.impls
    ours = implementations[compilation.NORM_PROVIDER]
    assert ours.supports_args(x, weight, 1e-6)
    expected = implementations["native"].impl_fn(x, weight, 1e-6)
    allowed = tolerances.within(2 * tolerances.norm(x.shape[-1]))  # of either of the two
    torch.testing.assert_close(ours.impl_fn(x, weight, 1e-6), expected, **allowed)


@pytest.mark.numerics
def test_16_bit_types_are_left_to_the_definition() -> None:
    x = LAYOUTS["rows"].bfloat16()
    assert not ir.ops.rms_norm.impls[compilation.NORM_PROVIDER].supports_args(x, None, 1e-6)


RANK, K, SLICES = 4, 24, (6, 10)


@pytest.mark.numerics
@pytest.mark.parametrize("ids", [(7, 0, 7, 9, 0), (0, 0, 0, 0, 0), (9, 9, 9, 9, 9)])
def test_each_row_gets_its_own(ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own gives rows of none the last adapter."""
    monkeypatch.setattr(punica_selector, "current_platform", cpu.CpuPlatform())
    use_batched_adapters()
    wrapper = punica_selector.get_punica_wrapper(16, max_batches=8, device="cpu")
    assert isinstance(wrapper, BatchedAdapters)
    slots = [7, 9]
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), slots, 3, 100)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(ids), K, generator=generator)
    before = torch.randn(len(ids), sum(SLICES), generator=generator)
    down = tuple(torch.randn(2, 1, RANK, K, generator=generator) for _ in SLICES)
    up = tuple(torch.randn(2, 1, n, RANK, generator=generator) for n in SLICES)
    out = before.clone()
    wrapper.add_lora_linear(out, x, down, up, 0.5, SLICES)
    for row, adapter in enumerate(ids):
        expected = before[row]
        if adapter:
            slot = slots.index(adapter)
            parts = [b[slot, 0] @ (a[slot, 0] @ x[row]) for a, b in zip(down, up, strict=True)]
            expected = expected + 0.5 * torch.cat(parts)
        torch.testing.assert_close(
            out[row], expected, **tolerances.within(tolerances.product(K), 100.0)
        )


VOCAB = 12


@pytest.mark.numerics
@pytest.mark.parametrize("drawn", [False, True], ids=["best-guess", "drawn"])
@pytest.mark.parametrize("seed", range(2))
def test_same_tokens_as_vllms_kernels(seed: int, drawn: bool) -> None:
    kernel_of("spec_decode.rejection_sampler_utils._rejection_kernel")
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    stock = rejection_sampler_utils.rejection_sample
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_steps, num_slots = 4, 40
    num_reqs = int(rng.integers(20, 41))
    slots = torch.from_numpy(rng.permutation(num_slots)[:num_reqs])
    num_rows = rng.integers(1, num_steps + 2, num_reqs)
    total = int(num_rows.sum())
    target = 2 * torch.randn(total, VOCAB, generator=generator)
    draft_logits = None
    if drawn:  # alike, or nothing would be accepted
        draft_logits = torch.randn(num_slots, num_steps, VOCAB, generator=generator)
        target *= 0.5
    drafts = torch.where(
        torch.rand(total, generator=generator) < 0.7,
        target.roll(1, dims=0).argmax(dim=1),
        torch.randint(-1, VOCAB, (total,), generator=generator),
    ).int()
    arguments = (
        target,
        draft_logits,
        drafts,
        torch.from_numpy(np.cumsum([0, *num_rows])).int(),
        torch.from_numpy(rng.integers(0, 3000, total)),
        slots,
        slots.repeat_interleave(torch.from_numpy(num_rows)),
        torch.from_numpy(np.concatenate([np.arange(n) for n in num_rows])).int(),
        torch.from_numpy(rng.choice([0.0, 0.8, 1.0], num_slots)).float(),
        torch.from_numpy(rng.integers(-(2**62), 2**62, num_slots)),
        num_steps,
    )
    tokens, counts = rejection_sample(*arguments)
    expected_tokens, expected_counts = stock(*arguments)
    assert counts.tolist() == expected_counts.tolist()
    for row, count in enumerate(counts.tolist()):
        assert tokens[row, :count].tolist() == expected_tokens[row, :count].tolist()


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
