"""Verification of drafts, greedy and drawn, against vLLM's kernels with the same random numbers.
That such tokens are distributed as the target's: `tests/engine/test_drafters.py`."""

import numpy as np
import pytest
import torch

from tests.unit.cpu.kernel_inputs import kernel_of
from vllm_dllm.cpu.verification import rejection_sample

pytestmark = pytest.mark.numerics

VOCAB = 12


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
