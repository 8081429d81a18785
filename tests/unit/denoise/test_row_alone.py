"""What is made of a row depends on that row alone, and the noise on its keys: the same bits in a
step of any size, wherever in it the row lies, with any number of threads. A vector of a loop and
what is left at its end may round differently (a product and a sum, fused or not; a library's
logarithm), and which elements of a row are left over depends on all of these."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from scipy import stats

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.denoise import draws_triton, noise
from vllm_dllm.denoise.logit_rules import LogitRules, Penalties, exclude_below_min_p_
from vllm_dllm.denoise.row_stats import row_stats
from vllm_dllm.denoise.step import temperature

pytestmark = pytest.mark.numerics

# Sizes of vocabularies: not a multiple of any vector's width, of every one, and one that threads
# share in pieces which are not.
C = {509: 24, 512: 256, 1001: 70}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = ("alone", "at an odd address", "with the rows after it", "with the rows before it")


def canvas(V: int) -> torch.Tensor:
    return 8 * torch.randn(C[V], V, generator=torch.Generator().manual_seed(V))


def penalties(V: int, **values: float) -> LogitRules:
    generator = torch.Generator().manual_seed(1)
    chosen = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, **values}
    return LogitRules(
        penalties=Penalties(
            **chosen,
            counts=torch.randint(0, 9, (V,), generator=generator).float(),
            in_prompt=torch.rand(V, generator=generator) < 0.3,
        )
    )


def bias(V: int) -> LogitRules:
    return LogitRules(bias=torch.randn(V, generator=torch.Generator().manual_seed(2)))


RULES: dict[str, Callable[[int], LogitRules]] = {
    "bias": bias,
    "allowed_token_ids": lambda V: LogitRules(excluded=torch.arange(V) % 7 < 5),
    "min_tokens": lambda V: LogitRules(early_stops=torch.tensor([1, V - 1]), stops_from=1000),
    "repetition_penalty": lambda V: penalties(V, repetition=1.3),
    "frequency_penalty": lambda V: penalties(V, frequency=0.3),
    "presence_penalty": lambda V: penalties(V, presence=0.3),
    "all penalties": lambda V: penalties(V, presence=-0.7, frequency=1.1, repetition=0.6),
}


def of_rules(rules: LogitRules, rows: torch.Tensor, first: int, V: int) -> torch.Tensor:
    guess = torch.randint(0, V, (C[V],), generator=torch.Generator().manual_seed(3))
    rules.apply_(rows, first, torch.tensor(40), guess)
    return rows


def min_p(rows: torch.Tensor) -> torch.Tensor:
    exclude_below_min_p_(rows, torch.full((len(rows), 1), 0.07))
    return rows


def top_k_top_p(rows: torch.Tensor) -> torch.Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    top_k = torch.full((len(rows),), 40, dtype=torch.int32, device=DEVICE)
    top_p = torch.full((len(rows),), 0.9, device=DEVICE)
    return apply_top_k_top_p(rows.to(DEVICE), top_k, top_p).cpu()


def statistics(rows: torch.Tensor) -> torch.Tensor:
    stats, probs = row_stats(rows, torch.full((len(rows),), 0.37, dtype=torch.float64))
    return torch.cat((torch.stack(list(stats), dim=1).double(), probs.double()), dim=1)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "temperature": lambda rows: rows / torch.full((len(rows), 1), 0.37),
    "min_p": min_p,
    "top_k and top_p": top_k_top_p,
    "statistics": statistics,
}


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def placed(rows: torch.Tensor, i: int, place: str) -> tuple[torch.Tensor, int, int]:
    """A copy of row i and of what lies around it; the first row of that, and where row i is."""
    if place == "alone":
        return rows[i : i + 1].clone(), i, 0
    if place == "at an odd address":
        buffer = torch.empty(rows.shape[1] + 3)
        return buffer[3:].copy_(rows[i])[None], i, 0
    if place == "with the rows after it":
        return rows[i:].clone(), i, 0
    return rows[: i + 1].clone(), 0, i


def differing(V: int, of: Callable[[torch.Tensor, int], torch.Tensor]) -> list[str]:
    rows = canvas(V)
    whole = of(rows.clone(), 0)
    found = []
    for place in PLACES:
        for i in (0, 1, 7, C[V] - 1):
            part, first, row = placed(rows, i, place)
            if not torch.equal(of(part, first)[row], whole[i]):
                found.append(f"row {i} {place}")
    return found


@pytest.mark.parametrize("V", C)
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, V: int) -> None:
    assert differing(V, lambda rows, first: of_rules(RULES[name](V), rows, first, V)) == []


@pytest.mark.parametrize("V", C)
@pytest.mark.parametrize("name", OTHERS)
def test_what_follows_the_rules(name: str, V: int) -> None:
    assert differing(V, lambda rows, _: OTHERS[name](rows)) == []


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
        drawn.temperature, expected[:, None].expand(-1, canvas_length), **tolerances.short_formula()
    )
    assert drawn.starts.equal(starts)
    of_step = noise.step_noise(keys, starts, lengths, done, canvas_length, vocab_size)
    for ours, other in zip(drawn.noise, of_step, strict=True):
        assert ours.dtype == other.dtype and torch.equal(ours, other)
