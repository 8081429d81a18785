"""Verification of drafts: by hand, against vLLM's kernels, and as a distribution."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests import tolerances
from tests.unit.cpu.kernel_inputs import kernel_of
from vllm_dllm.cpu.verification import Draws, rejection_sample, verify

pytestmark = pytest.mark.numerics

VOCAB = 12


def refuse_to_draw(*args: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a greedy request drew a random number")


GREEDY = Draws(uniform=refuse_to_draw, gumbel=refuse_to_draw)


def verify_greedily(best: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Tokens of each request; `best` has a token for each row, `drafts` one less."""
    rows = torch.tensor([token for row in best for token in row])
    inputs = torch.tensor([token for row in drafts for token in (99, *row)])
    bounds = torch.tensor(np.cumsum([0, *map(len, best)])).int()
    logits = torch.nn.functional.one_hot(rows, VOCAB).float()
    greedy = torch.ones(len(best), dtype=torch.bool)
    width = max(map(len, best))
    tokens, counts = verify(logits, inputs, bounds, width, greedy, GREEDY)
    return [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]


@pytest.mark.parametrize(
    ("best", "drafts", "tokens"),
    [
        pytest.param([5, 6, 7], [5, 6], [5, 6, 7], id="all"),
        pytest.param([5, 6, 7], [4, 6], [5], id="none"),
        pytest.param([5, 6, 7], [5, 0], [5, 6], id="some"),
        pytest.param([5, 6, 7, 8], [5, 0, 7], [5, 6], id="right-after-wrong"),
        pytest.param([5], [], [5], id="no-drafts"),
        pytest.param([5, 6], [-1], [5], id="placeholder"),
    ],
)
def test_greedy(best: list[int], drafts: list[int], tokens: list[int]) -> None:
    assert verify_greedily([best], [drafts]) == [tokens]


def test_a_refusal_truncates_no_neighbour() -> None:
    best = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]
    drafts = [[0, 2], [4, 5, 6], [], [9]]
    assert verify_greedily(best, drafts) == [[1], [4, 5, 6, 7], [8], [9, 10]]


@pytest.mark.parametrize("drawn", [False, True], ids=["best-guess", "drawn"])
@pytest.mark.parametrize("seed", range(12))
def test_same_tokens_as_vllms_kernels(
    seed: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_of("spec_decode.rejection_sampler_utils._rejection_kernel")
    from triton import language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    # Triton's interpreter has no libdevice.
    libdevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    monkeypatch.setattr(rejection_sampler_utils, "tldevice", libdevice)
    stock = rejection_sampler_utils.rejection_sample
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_steps, num_slots = 4, 9
    num_reqs = int(rng.integers(1, 6))
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


@pytest.mark.parametrize("drawn", [False, True], ids=["best-guess", "drawn"])
def test_tokens_are_distributed_as_the_targets(drawn: bool) -> None:
    """20,000 requests of two drafts each: every emitted token of either place, given that the place
    is reached, follows the target's distribution there."""
    num_reqs = 20_000
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(3, VOCAB, generator=generator)
    proposal = target[:2] + torch.randn(2, VOCAB, generator=generator)
    drafts = proposal.argmax(dim=1).expand(num_reqs, 2)
    if drawn:
        drafts = torch.multinomial(proposal.softmax(dim=1), num_reqs, True, generator=generator).T
    inputs = torch.cat((torch.zeros(num_reqs, 1, dtype=torch.long), drafts), dim=1).flatten()
    draws = Draws(
        uniform=lambda: torch.rand(3 * num_reqs, generator=generator),
        gumbel=lambda rows: -torch.empty(len(rows), VOCAB).exponential_(generator=generator).log(),
    )
    tokens, counts = verify(
        target.repeat(num_reqs, 1),
        inputs,
        torch.arange(0, 3 * num_reqs + 1, 3).int(),
        3,
        torch.zeros(num_reqs, dtype=torch.bool),
        draws,
        proposal[[0, 1, 1]].repeat(num_reqs, 1) if drawn else None,
    )
    assert len(set(counts.tolist())) == 3
    for place in range(3):
        observed = tokens[counts > place, place].bincount(minlength=VOCAB)
        expected = target[place].double().softmax(dim=0) * observed.sum()
        assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > tolerances.P_VALUE
