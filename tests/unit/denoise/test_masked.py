"""Which positions a masked model's step reveals, against the published rules in plain Python."""

import bisect
import itertools
import random

import pytest
import torch

from vllm_dllm.denoise.masked import (
    NO_BOUND,
    Ahead,
    Candidates,
    Edits,
    GrammarReveal,
    MaskedRules,
    even_share,
    hidden_ahead,
    hidden_in_first_part,
    masked_step,
    reveal_candidates,
    verify_step,
)

C = 8


def published(
    rule: str,
    hidden: list[int],
    probability: list[float],
    entropy: list[float],
    least: int,
    threshold: float,
    bound: float,
) -> set[int]:
    """The positions that SDAR's loops transfer; `hidden` ones are in rising order."""
    if rule == "sequential":
        return set(hidden[:least])
    if rule == "entropy":
        order = sorted(hidden, key=lambda i: entropy[i])
        sums = list(itertools.accumulate(entropy[i] for i in order))
        return set(order[: max(1, bisect.bisect_left(sums, bound))])
    surest = sorted(hidden, key=lambda i: -probability[i])[:least]
    over = [i for i in hidden if probability[i] > threshold]
    return set(over if rule == "dynamic" and len(over) >= least else surest)


def rules_of(rule: str, least: int, threshold: float, bound: float) -> MaskedRules:
    return MaskedRules(
        threshold=torch.tensor([threshold if rule == "dynamic" else 2.0]),
        least=torch.tensor([1 if rule == "entropy" else least]),
        in_order=torch.tensor([rule == "sequential"]),
        entropy_bound=torch.tensor([bound if rule == "entropy" else NO_BOUND]),
    )


@pytest.mark.parametrize("rule", ["dynamic", "static", "sequential", "entropy"])
def test_reveals_what_the_published_rule_does(rule: str) -> None:
    draw = random.Random(0)
    rules, rows, expected = [], [], []
    for _ in range(500):
        hidden = sorted(draw.sample(range(C), draw.randint(1, C)))
        # Multiples of 1/64: their sums are exact, and equal the bound at times.
        probability = [draw.randint(1, 64) / 64 for _ in range(C)]
        entropy = [draw.randint(0, 64) / 64 for _ in range(C)]
        probability = [p + i / 4096 for i, p in enumerate(probability)]  # no two alike
        entropy = [e + i / 4096 for i, e in enumerate(entropy)]
        least, threshold, bound = draw.randint(1, 4), probability[0], draw.randint(0, 128) / 64
        rules.append(rules_of(rule, least, threshold, bound))
        rows.append((probability, entropy, [i in hidden for i in range(C)]))
        expected.append(published(rule, hidden, probability, entropy, least, threshold, bound))
    probabilities, entropies, masks = map(torch.tensor, zip(*rows, strict=True))
    candidates = Candidates(torch.zeros_like(masks, dtype=torch.int64), probabilities, entropies)
    together = MaskedRules(*(torch.cat(column) for column in zip(*rules, strict=True)))
    found = reveal_candidates(candidates, masks, together)
    assert [set(row.nonzero().flatten().tolist()) for row in found] == expected


def test_of_equals_the_first() -> None:
    candidates = Candidates(
        torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 0.5), torch.ones(1, 4)
    )
    hidden = torch.tensor([[False, True, True, True]])
    found = reveal_candidates(candidates, hidden, rules_of("static", 2, 0.0, 0.0))
    assert found.tolist() == [[False, True, True, False]]


@pytest.mark.parametrize(
    ("num_steps", "shares"),
    [(1, [8]), (3, [3, 3, 2]), (8, [1] * 8), (10, [1] * 8 + [0, 0])],
    ids=str,
)
def test_shares_are_even(num_steps: int, shares: list[int]) -> None:
    steps = torch.arange(num_steps)
    assert even_share(steps, torch.full_like(steps, num_steps), C).tolist() == shares


def test_edits_until_nothing_changes() -> None:
    """Canvases: one that does not edit, one with a mask, one that changes, one that is at its last
    step, one that does not change."""
    n, mask_id = 5, 99
    canvas = torch.tensor([[1, 2], [1, mask_id], [1, 2], [1, 2], [1, 2]])
    candidates = Candidates(
        torch.tensor([[5, 6], [5, 6], [5, 6], [5, 6], [1, 6]]),
        torch.tensor([[0.95, 0.5]]).expand(n, 2),
        torch.ones(n, 2),
    )
    edits = Edits(
        is_chosen=torch.tensor([False, True, True, True, True]),
        threshold=torch.full((n,), 0.9),
        most_steps=torch.full((n,), 3),
        steps_done=torch.tensor([0, 0, 0, 2, 0]),
    )
    rules = MaskedRules(*(column.expand(n) for column in rules_of("static", 1, 0.0, 0.0)))
    outcome = masked_step(candidates, canvas, canvas != mask_id, None, rules, edits, mask_id)
    assert outcome.canvas.tolist() == [[1, 2], [5, 6], [5, 2], [5, 2], [1, 2]]
    assert outcome.revealed.all()
    assert outcome.edited is not None
    assert outcome.edited.steps_done.tolist() == [1, 0, 1, 3, 1]
    assert outcome.finished.tolist() == [True, False, False, True, True]
    assert outcome.edited.unchanged.tolist() == [False, False, False, False, True]


def test_a_grammar_says_what_is_revealed() -> None:
    """Canvases: one that none concerns, one with a run of two, whose second token is the row's own,
    one whose answer has ended before."""
    n, C, mask_id = 3, 4, 99
    canvas = torch.tensor([[mask_id] * C, [7, *[mask_id] * 3], [mask_id] * C])
    candidates = Candidates(
        torch.tensor([[1, 2, 3, 4]]).expand(n, C),
        torch.tensor([[0.1, 0.2, 0.3, 0.9]]).expand(n, C),
        torch.ones(n, C),
    )
    by_grammar = GrammarReveal(
        is_ruled=torch.tensor([False, True, True]),
        is_chosen=torch.tensor([False, True, False]),
        revealed=torch.tensor([[False] * 4, [False, True, True, False], [False] * 4]),
        tokens=torch.tensor([[-1] * 4, [-1, 42, -1, -1], [-1] * 4]),
    )
    rules = MaskedRules(*(column.expand(n) for column in rules_of("dynamic", 1, 0.8, 0.0)))
    outcome = masked_step(
        candidates, canvas, canvas != mask_id, None, rules, None, mask_id, by_grammar=by_grammar
    )
    hidden = mask_id
    assert outcome.canvas.tolist() == [
        [hidden, hidden, hidden, 4],
        [7, 42, 3, hidden],
        [hidden, hidden, hidden, 4],
    ]
    assert not outcome.finished.any()


def test_nothing_counts_behind_a_stop_token() -> None:
    """Canvases: hidden before a stop, hidden behind one, a stop that is a candidate only, all
    revealed by this step, a stop revealed by this step."""
    n, M = 5, 99
    canvas = torch.tensor([[1, M, 7, M], [1, 8, M, M], [1, M, M, 3], [1, 2, 3, M], [1, 2, M, M]])
    candidates = Candidates(
        torch.full((n, 4), 5), torch.tensor([[0.5, 0.5, 0.7, 0.6]]).expand(n, 4), torch.ones(n, 4)
    )
    candidates.tokens[2, 1] = candidates.tokens[4, 2] = 7
    rules = MaskedRules(*(column.expand(n) for column in rules_of("static", 1, 0.0, 0.0)))

    def finished(stops: torch.Tensor | None) -> list[bool]:
        outcome = masked_step(candidates, canvas, canvas != M, None, rules, None, M, stops)
        return outcome.finished.tolist()

    assert finished(torch.tensor([[7, 8]]).expand(n, 2)) == [False, True, False, True, True]
    assert finished(None) == [False, False, False, True, False]


def test_drafts_are_verified() -> None:
    """Canvases of two tokens, so that drafts agree often, against the rule in plain Python."""
    n, M, stop = 400, 99, 7
    generator = torch.Generator().manual_seed(0)
    known = torch.randint(0, C, (n, 1), generator=generator)
    revealed = torch.arange(C) < known
    canvas, tokens = (torch.randint(6, 8, (n, C), generator=generator) for _ in range(2))
    is_draft = torch.rand(n, generator=generator) < 0.7
    canvas = torch.where(revealed | is_draft[:, None], canvas, M)
    valid = torch.arange(C) < torch.randint(C // 2, C + 1, (n, 1), generator=generator)
    valid |= revealed
    stops = torch.tensor([[stop]]).expand(n, 1)
    found = verify_step(tokens, canvas, revealed, valid, is_draft, stops, M)
    num_accepted = 0
    for i in range(n):
        first, last, row = int(known[i]), int(valid[i].sum()), canvas[i].tolist()
        wanted, end = tokens[i].tolist(), first
        while is_draft[i] and end < last and (end == first or wanted[end - 1] == row[end - 1]):
            end += 1
        num_accepted += end - first
        shown = row[:first] + wanted[first:end]
        assert found.revealed[i].tolist() == [j < end for j in range(C)]
        assert found.tokens[i].tolist() == row[:first] + wanted[first:]
        assert found.canvas[i].tolist() == (
            shown + [M] * (C - end) if is_draft[i] else row[:first] + wanted[first:]
        )
        assert bool(found.finished[i]) == (end == last or stop in shown)
    assert num_accepted > int(is_draft.sum())


@pytest.mark.parametrize(
    ("least", "expected"),
    [(1, [[2], [5], [4, 5, 7]]), (2, [[2, 4], [5], [4, 5, 7]]), (0, [[2], [5], [4, 5, 7]])],
    ids=["one", "more than the part has", "none, so one"],
)
def test_parts_are_revealed_one_after_the_other(least: int, expected: list[list[int]]) -> None:
    """Parts of 3, 2 and 3 positions, as in a canvas that begins inside its block."""
    parts = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).expand(3, C)
    hidden = torch.zeros(3, C, dtype=torch.bool)
    for row, positions in enumerate(([2, 4], [5], [4, 5, 7])):
        hidden[row, positions] = True
    parts = torch.where(torch.tensor([[False], [False], [True]]), 0, parts)
    found = hidden_in_first_part(hidden, parts, torch.full((3,), least))
    assert [row.nonzero().flatten().tolist() for row in found] == expected


def test_as_many_parts_as_asked_for_are_revealed_ahead() -> None:
    """Counted from the first with anything hidden, which is the second one of the last canvas."""
    parts = torch.tensor([0, 0, 1, 1, 2, 2]).expand(4, 6)
    hidden = torch.ones(4, 6, dtype=torch.bool)
    hidden[3, :3] = False
    ahead = Ahead(torch.full((4,), 0.9), torch.tensor([1.0, 2.0, torch.inf, 1.0]))
    expected = [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [3]]
    found = hidden_ahead(hidden, parts, ahead)
    assert [row.nonzero().flatten().tolist() for row in found] == expected
    assert torch.equal(hidden_ahead(hidden, parts, ahead._replace(num_parts=None)), hidden)
