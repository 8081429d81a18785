"""A step's temperature and noise in one pass against their definitions, in Triton's interpreter
where there is no GPU."""

from types import ModuleType

import pytest
import torch

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.denoise import draws_triton, noise
from vllm_dllm.denoise.step import temperature

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = (3, -9, 2**63 - 1, 0)


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    if not torch.cuda.is_available():
        interpret_kernels(draws_triton)
    return draws_triton


@pytest.mark.parametrize(("canvas_length", "vocab_size"), [(24, 100), (256, 262_144)])
def test_draws(fused: ModuleType, canvas_length: int, vocab_size: int) -> None:
    # Columns of a table: seed, steps done, steps.
    rows = [(seed, done, 48) for seed, done in zip(SEEDS, (0, 7, 47, 60), strict=True)]
    numbers = torch.tensor(rows, dtype=torch.int64)
    numbers[:, 0] = noise.keys_from_seeds(numbers[:, 0])
    numbers = numbers.to(DEVICE)
    schedule = 0.1 * torch.arange(8.0, device=DEVICE).view(4, 2)
    slots = torch.tensor([2, 0, 3], device=DEVICE)
    starts = torch.tensor([1000, 0, 10**6], device=DEVICE)
    lengths = torch.tensor([canvas_length, 5, 1], device=DEVICE)
    drawn = fused.temperature_and_noise(
        slots,
        (starts + lengths).int(),
        lengths,
        numbers.unbind(dim=-1),
        schedule.unbind(dim=-1),
        canvas_length,
        vocab_size,
    )
    keys, done, most = numbers[slots].unbind(dim=-1)
    expected = temperature(done, most, *schedule[slots].unbind(dim=-1))
    torch.testing.assert_close(
        drawn.temperature,
        expected[:, None].expand(-1, canvas_length),
        **tolerances.short_formula(),
    )
    assert drawn.starts.equal(starts)
    of_step = noise.step_noise(keys, starts, lengths, done, canvas_length, vocab_size)
    for ours, other in zip(drawn.noise, of_step, strict=True):
        assert ours.dtype == other.dtype and torch.equal(ours, other)
