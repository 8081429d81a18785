"""The noise is a function of its keys alone, and looks random along each of them; a step's
temperature and noise in one pass are what their definitions say."""

from types import ModuleType

import pytest
import torch
from scipy import stats

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.denoise import draws_triton, noise
from vllm_dllm.denoise.step import temperature

pytestmark = pytest.mark.numerics

POSITIONS = torch.arange(256)[None]


def draw(seed: int, steps: int = 0, stream: int = noise.CANDIDATE) -> torch.Tensor:
    keys = noise.keys_from_seeds(torch.tensor([seed]))
    return noise.uniform(keys, POSITIONS, torch.tensor([steps]), stream)


def test_same_keys_same_noise_in_any_batch() -> None:
    seeds = torch.tensor([5, -(2**63), 2**63 - 1, 0])
    keys = noise.keys_from_seeds(seeds)
    together = noise.uniform(keys, POSITIONS.expand(4, -1), torch.tensor([3, 0, 1, 2]), 1)
    for row, (seed, steps) in enumerate(zip(seeds.tolist(), [3, 0, 1, 2], strict=True)):
        assert torch.equal(together[row], draw(seed, steps, 1)[0])


def test_noise_is_uniform_and_uncorrelated_along_every_key() -> None:
    by_seed = torch.cat([draw(seed) for seed in range(64)])
    by_step = torch.cat([draw(7, steps) for steps in range(64)])
    by_stream = torch.cat([draw(7, 0, stream) for stream in range(3)])
    by_position = draw(7)[0].unfold(0, 4, 4).T
    for values in (by_seed, by_step, by_stream, by_position):
        assert values.min() >= 0 and values.max() < 1
        assert abs(values.mean() - 0.5) < tolerances.mean_of_uniform(values.numel())
        correlation = torch.corrcoef(values) - torch.eye(len(values))
        assert correlation.abs().max() < tolerances.correlation(values.shape[1])
    histogram = torch.histc(by_seed, 16, 0.0, 1.0)
    assert stats.chisquare(histogram.numpy()).pvalue > tolerances.P_VALUE


def test_tokens_cover_the_vocabulary() -> None:
    keys = noise.keys_from_seeds(torch.arange(40))
    tokens = noise.uniform_tokens(keys, POSITIONS.expand(40, -1), torch.zeros(40), 2, 100)
    assert tokens.dtype == torch.int64
    assert sorted(tokens.unique().tolist()) == list(range(100))


def test_step_noise_is_the_three_streams() -> None:
    keys, steps = noise.keys_from_seeds(torch.tensor([3, -9])), torch.tensor([0, 7])
    starts, lengths = torch.tensor([1000, 17]), torch.tensor([256, 90])
    drawn = noise.step_noise(keys, starts, lengths, steps, 256, 100)
    here = POSITIONS + starts[:, None]
    following = here + lengths[:, None]
    assert torch.equal(drawn.candidate, noise.uniform(keys, here, steps, noise.CANDIDATE))
    renoise = noise.uniform_tokens(keys, here, steps, noise.RENOISE, 100)
    assert torch.equal(drawn.renoise, renoise)
    first = noise.uniform_tokens(keys, following, torch.zeros(2), noise.INITIAL, 100)
    assert torch.equal(drawn.next_canvas, first)


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
