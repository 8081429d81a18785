"""A step's temperature and noise in one pass against their definitions, in Triton's interpreter
where there is no GPU."""

from types import ModuleType

import pytest
import torch

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.denoise import draws_triton, noise
from vllm_dllm.denoise.temperature import temperature

pytestmark = pytest.mark.numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = (3, -9, 2**63 - 1, 0)


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    if not torch.cuda.is_available():
        interpret_kernels(draws_triton)
    return draws_triton


@pytest.mark.parametrize("settings", ["the server's", "each its own"])
@pytest.mark.parametrize(("canvas_length", "vocab_size"), [(24, 100), (256, 262_144)])
def test_draws(fused: ModuleType, canvas_length: int, vocab_size: int, settings: str) -> None:
    # Columns of a table: seed, steps done, steps.
    rows = [(seed, done, 48) for seed, done in zip(SEEDS, (0, 7, 47, 60), strict=True)]
    numbers = torch.tensor(rows, dtype=torch.int64)
    numbers[:, 0] = noise.keys(numbers[:, 0])
    keys, done, most = numbers.to(DEVICE).unbind(dim=-1)
    starts = torch.tensor([1000, 17, 0, 10**6], device=DEVICE)
    lengths = torch.tensor([canvas_length, 5, 1, canvas_length], device=DEVICE)
    t_min: float | torch.Tensor = 0.4
    t_span: float | torch.Tensor = 0.4
    if settings == "each its own":
        t_min, t_span = (0.1 * torch.arange(8.0, device=DEVICE).view(4, 2)).unbind(dim=-1)
    found, drawn = fused.temperature_and_noise(
        keys, starts, lengths, done, most, t_min, t_span, canvas_length, vocab_size
    )
    torch.testing.assert_close(
        found, temperature(done, most, t_min, t_span), **tolerances.short_formula()
    )
    expected = noise.step_noise(keys, starts, lengths, done, canvas_length, vocab_size)
    for ours, other in zip(drawn, expected, strict=True):
        assert ours.dtype == other.dtype and torch.equal(ours, other)
