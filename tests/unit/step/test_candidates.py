"""What a grammar's walk is told of a canvas' rows, and what its masks take from their logits, in
tiles or at once."""

import math

import numpy as np
import pytest
import torch

from tests import tolerances
from tests.unit.step.batches import Model
from tests.unit.step.test_logits import LARGEST, LENGTHS, H, make
from tests.unit.step.test_logits import C as LONGEST
from vllm_dllm.denoise.impossible import ILLEGAL_LOGIT, MASKED_LOGIT
from vllm_dllm.denoise.logit_rules import LogitRules
from vllm_dllm.denoise.rules import Reveal
from vllm_dllm.grammar.masks import mask_of_tokens
from vllm_dllm.grammar.walk import MORE_TOKENS
from vllm_dllm.models import vocabulary
from vllm_dllm.step.asked.answer import MOST_PROBABLE, read_canvas_rows
from vllm_dllm.step.logits.canvas_logits import RowMasks, WholeLogits
from vllm_dllm.step.logits.streamed_logits import StreamedLogits

V, AT = 3_000, 1  # the canvas that has rules, between two others
L, FIRST = LENGTHS[AT], LENGTHS[0]
ALLOWED = 2 * tolerances.entropy(V, LARGEST, spread=math.log(V))


@pytest.fixture(params=["whole", "row by row"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """The logits of a step, the temperatures of canvas AT, [L, 1] each another one, and the
    log-probabilities [L, V] that follow."""
    group = type("Group", (), {"world_size": 1})
    monkeypatch.setattr(vocabulary, "get_tp_group", group)
    generator = torch.Generator().manual_seed(0)
    model = Model(2 * torch.randn(V, H, generator=generator))
    hidden = torch.randn(sum(LENGTHS), H, generator=generator)
    rules = LogitRules(bias=torch.linspace(-5, 5, V))
    whole = model.compute_logits(hidden)
    if request.param == "whole":
        logits = make(WholeLogits, whole, model, rules)
    else:
        logits = make(StreamedLogits, hidden, model, rules, budget=1)
    temperature = torch.rand(L, 1, generator=generator) + 0.4
    scaled = (whole[FIRST : FIRST + L] + rules.bias) / temperature
    return logits, temperature, scaled.log_softmax(dim=-1)


@pytest.mark.numerics
def test_the_most_probable_tokens_of_each_row(asked: tuple) -> None:
    logits, temperature, logprobs = asked
    rows = read_canvas_rows(logits, AT, temperature, None)
    expected = logprobs.topk(MOST_PROBABLE)
    assert len(rows) == L
    assert np.array_equal(rows.tokens, expected.indices.numpy())
    tolerances.assert_within(torch.from_numpy(rows.logprobs), expected.values, ALLOWED)
    for row in (0, L - 1):
        tokens, more = rows.more(row)
        deep = logprobs[row].topk(MORE_TOKENS)
        assert np.array_equal(tokens, deep.indices.numpy())
        tolerances.assert_within(torch.from_numpy(more), deep.values, ALLOWED)


@pytest.mark.numerics
def test_the_best_of_improbable_legal_tokens(asked: tuple) -> None:
    """Is as probable as it was among all."""
    logits, temperature, logprobs = asked
    rows = read_canvas_rows(logits, AT, temperature, None)
    for row in (0, 4, L - 1):
        legal = logprobs[row].argsort()[:20]
        token, logprob = rows.best_legal(row, mask_of_tokens(legal.tolist(), V))
        assert token == legal[-1]
        assert abs(logprob - logprobs[row, token]) <= ALLOWED


@pytest.mark.numerics
def test_what_is_revealed_for_good_is_sure(asked: tuple) -> None:
    """All others of its row are improbable. Of canvases that only accept for a step, nothing is."""
    logits, temperature, _ = asked
    plain = read_canvas_rows(logits, AT, temperature, None)
    revealed = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.bool)
    revealed[AT, [2, 5]], revealed[0, 3] = True, True
    revealed[AT, L:] = True  # no rows of this canvas
    tokens = torch.full((len(LENGTHS), LONGEST), 7)
    for is_chosen in (True, False):
        chosen = torch.tensor([not is_chosen, is_chosen, not is_chosen])
        reveal = Reveal(chosen, torch.ones(3), torch.ones(3), revealed, tokens)
        rows = read_canvas_rows(logits, AT, temperature, reveal)
        for row in range(L):
            if is_chosen and row in (2, 5):
                assert rows.tokens[row, 0] == 7 and rows.logprobs[row, 0] == 0.0
                assert np.array_equal(rows.tokens[row, 1:], plain.tokens[row, :-1])
                assert (rows.logprobs[row, 1:] <= -20.0).all()
            else:
                assert np.array_equal(rows.tokens[row], plain.tokens[row])
                assert np.array_equal(rows.logprobs[row], plain.logprobs[row])


@pytest.mark.numerics
def test_no_more_tokens_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = torch.randn(sum(LENGTHS), 5)
    model = Model(torch.randn(5, H))
    rows = read_canvas_rows(make(WholeLogits, few, model), AT, torch.ones(L, 1), None)
    assert rows.tokens.shape == (L, 5) and len(rows.more(0)[0]) == 5


LENGTH, SIZE = 7, 101


def masks() -> tuple[RowMasks, torch.Tensor]:
    """Of some rows, and the legal tokens [L, V] bool of all."""
    rng = np.random.default_rng(0)
    rows = np.array([0, 2, 3, 6])
    legal = np.ones((LENGTH, SIZE), dtype=bool)
    legal[rows] = rng.random((len(rows), SIZE)) < 0.3
    padded = np.zeros((len(rows), 128), dtype=bool)
    padded[:, :SIZE] = legal[rows]
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    return RowMasks(rows, words), torch.from_numpy(legal)


@pytest.mark.parametrize("tile", [1, 3, LENGTH])
def test_what_is_illegal_is_excluded(tile: int) -> None:
    logits = torch.randn(LENGTH, SIZE, generator=torch.Generator().manual_seed(0))
    row_masks, legal = masks()
    expected = torch.where(legal, logits, ILLEGAL_LOGIT)
    for first in range(0, LENGTH, tile):
        row_masks.exclude_(logits[first : first + tile], first)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_candidates_are_legal_where_sampling_parameters_leave_nothing() -> None:
    logits = torch.full((LENGTH, SIZE), MASKED_LOGIT)
    row_masks, legal = masks()
    row_masks.exclude_(logits, 0)
    probabilities = (logits / 0.4).softmax(dim=-1)
    assert (probabilities[~legal] == 0).all() and (probabilities[legal] > 0).all()
