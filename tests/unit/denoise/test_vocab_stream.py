"""A vocabulary read tile by tile against the same read at once."""

import pytest
import torch
from scipy import stats

from tests import tolerances
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.denoise.vocab_stream import BLOCK, VocabBlocks, join_blocks, read_blocks

pytestmark = pytest.mark.numerics

V = 3 * BLOCK + 100


def random_logits(rows: int, sharpness: float = 5.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return sharpness * torch.randn(rows, V, generator=generator)


def stream(logits: torch.Tensor, uniform: torch.Tensor, tile: int) -> RowStats:
    """Statistics with tiles of `tile` tokens."""
    parts = [
        read_blocks(logits[:, first : first + tile], uniform, first)[0]
        for first in range(0, logits.shape[1], tile)
    ]
    blocks = VocabBlocks(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))
    return join_blocks(blocks, uniform)


@pytest.mark.parametrize("tile", [BLOCK, 2 * BLOCK, 4 * BLOCK])
def test_statistics(tile: int) -> None:
    logits = random_logits(40)
    logits[0], logits[1, :5] = 0.0, 80.0  # all alike; several alike at the top
    logits[2], logits[2, 7] = -1e20, 3.0  # all but one excluded
    uniform = torch.rand(40, dtype=torch.float64)
    ours = stream(logits, uniform, tile)
    expected, _ = row_stats(logits, uniform)
    assert torch.equal(ours.best_guess, expected.best_guess)
    exact = logits.double().log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    spread = (-exact.amax(-1) - entropy).abs().max().item()
    allowed = tolerances.entropy(V, largest_logit=25.0, spread=spread)
    for found in (ours, expected):
        tolerances.assert_within(found.entropy_nats, entropy, allowed)
        tolerances.assert_within(found.best_logprob, exact.amax(-1), tolerances.softmax(V, 25.0))
    assert ours.candidate[2] == 7


def test_tiles_and_shards_change_nothing() -> None:
    logits, uniform = random_logits(64, 1.0), torch.rand(64, dtype=torch.float64)
    one, *others = (stream(logits, uniform, tile) for tile in (4 * BLOCK, BLOCK, 2 * BLOCK))
    for other in others:
        for column, same in zip(one, other, strict=True):
            assert torch.equal(column, same)


@pytest.mark.slow
def test_candidates_follow_the_distribution() -> None:
    """The two stages of a draw together: 200,000 draws over four blocks."""
    probs = torch.zeros(V)
    tokens = torch.tensor([3, 900, BLOCK + 5, 2 * BLOCK + 17, V - 1])
    probs[tokens] = torch.tensor([0.1, 0.2, 0.4, 0.05, 0.25])
    draws = 4000
    logits = probs.log().clamp(min=-1e20).expand(draws, -1)
    counts = torch.zeros(V)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
        candidate = stream(logits, uniform, 2 * BLOCK).candidate
        counts += torch.bincount(candidate, minlength=V)
    assert counts[probs == 0].sum() == 0
    expected = probs[tokens].double() * 10 * draws
    found = stats.chisquare(counts[tokens].numpy(), expected.numpy(), sum_check=False)
    assert found.pvalue > tolerances.P_VALUE


def test_a_row_of_nan_points_into_the_vocabulary() -> None:
    logits = torch.full((1, V), torch.nan)
    ours = stream(logits, torch.tensor([0.5], dtype=torch.float64), BLOCK)
    for tokens in (ours.best_guess, ours.candidate):
        assert 0 <= tokens.item() < V
