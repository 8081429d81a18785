"""What sampling parameters do to a canvas' logits, position by position in plain Python."""

import math

import pytest
import torch

from tests import tolerances
from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.impossible import TRUNCATED_LOGIT
from vllm_dllm.denoise.logit_rules import CanvasRules, LogitRules, Penalties, exclude_below_min_p_
from vllm_dllm.denoise.rules import NO_TOKEN

pytestmark = pytest.mark.numerics

C, V = 6, 12
START = torch.tensor(40)
GUESS = torch.tensor([3, 7, 3, 3, 5, 7])


def random_logits() -> torch.Tensor:
    return torch.randn(C, V, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [slice(0, C), slice(2, 5)])
@pytest.mark.parametrize("known", [GUESS, torch.full((C,), NO_TOKEN)], ids=["guess", "no guess"])
@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"),
    [(0.7, 0.0, 1.0), (0.0, 0.4, 1.0), (0.0, 0.0, 1.8), (-0.2, 0.3, 0.6)],
)
def test_penalties(
    presence: float, frequency: float, repetition: float, known: torch.Tensor, rows: slice
) -> None:
    """As vLLM's for a position, with the guesses before it in the place of draft tokens."""
    committed = torch.tensor([5, 5, 9])
    prompt = [0, 3]
    penalties = Penalties(
        presence,
        frequency,
        repetition,
        torch.bincount(committed, minlength=V).float(),
        torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.tensor(prompt), True),
    )
    ours = random_logits()[rows]
    LogitRules(penalties=penalties).apply_(ours, rows.start, START, known)
    expected = random_logits()
    for i in range(C):
        before = committed.tolist() + [t for t in known[:i].tolist() if t != NO_TOKEN]
        for token in range(V):
            value = expected[i, token].item()
            if token in before or token in prompt:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * before.count(token) + presence * (token in before)
            expected[i, token] = value
    size = expected.abs().max().item() + presence + 4 * frequency
    torch.testing.assert_close(ours, expected[rows], **tolerances.short_formula(size))


def test_emitted_blocks_are_counted() -> None:
    penalties = Penalties(0, 1, 1, torch.zeros(V), torch.zeros(V, dtype=torch.bool))
    block = torch.tensor([3, 3, NO_TOKEN, 8])
    penalties.count_tokens_(block, torch.zeros(4, dtype=torch.bool))
    assert penalties.counts.sum() == 0
    penalties.count_tokens_(block, torch.tensor([True, False, True, True]))
    assert penalties.counts.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    penalties.counts.zero_()
    penalties.count_tokens_(block, torch.ones(4, dtype=torch.bool))
    assert penalties.counts.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0]


def test_rows_that_foretell_go_by_the_tokens_before_them() -> None:
    """Those of the canvas, which stand, whatever the rows say; not by any behind."""
    penalties = Penalties(1, 0, 1, torch.zeros(V), torch.zeros(V, dtype=torch.bool))
    words = BadWords([[3, 4], [7, 3, 9]])
    rules = LogitRules(penalties=penalties, bad_words=words, early_stops=torch.tensor([2]))
    rules.stops_from = 12
    canvas = torch.tensor([3, 8, 7, 3, NO_TOKEN, NO_TOKEN])
    for lead in (0, 1):
        logits = torch.zeros(6, V)
        before = torch.tensor([NO_TOKEN, 7])
        CanvasRules(rules, torch.tensor(8), canvas, before, canvas, torch.tensor(lead)).apply_(
            logits
        )
        excluded = [set((row < -100).nonzero()[:, 0].tolist()) for row in logits]
        early = [{2}] * (4 - lead) + [set()] * (2 + lead)
        bad = [{4, 9}, set(), set(), {4, 9}, set(), set()]
        assert excluded == [one | other for one, other in zip(early, bad, strict=True)]
        seen = [{3}, {3, 8}, {3, 7, 8}, {3, 7, 8}, {3, 7, 8}, {3, 7, 8}]
        assert [set((row == -1).nonzero()[:, 0].tolist()) for row in logits] == seen


def test_min_p() -> None:
    logits = torch.tensor([[0.0, -1.0, -3.0], [0.0, -1.0, -3.0]])
    exclude_below_min_p_(logits, torch.tensor([[0.1], [0.0]]))
    assert math.exp(-1) > 0.1 > math.exp(-3)
    assert logits.tolist() == torch.tensor([[0, -1, TRUNCATED_LOGIT], [0, -1, -3]]).tolist()
