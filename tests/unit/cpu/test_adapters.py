"""Rows of several adapters and none: each is multiplied with its own."""

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import punica_selector
from vllm.platforms import cpu

from tests import tolerances
from vllm_dllm.cpu.compat.platform_classes import BatchedAdapters, use_batched_adapters

pytestmark = pytest.mark.numerics

RANK, K, SLICES = 4, 24, (6, 10)


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
