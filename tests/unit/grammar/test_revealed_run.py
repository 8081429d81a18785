"""Runs that a step reveals for good: legal whatever the rows say, closed in time, as far as the
rule goes and no further."""

import json

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from tests.unit.grammar.canvases import EOS, SCHEMAS, V, noise, start, text_of
from vllm_dllm.grammar.canvas import RowCandidate, RunRule, reveal_run
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.masks import Exclusions, unpack_mask
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import StuckError

NO_BOUND = -1.0
NEVER = 2.0


def judge_of(logprobs: np.ndarray, rng: np.random.Generator | None = None):
    """Of rows [L, V]: the most probable legal token, or one that is drawn."""

    def judge(row: int, words: np.ndarray | None) -> RowCandidate:
        legal = np.ones(V, dtype=bool) if words is None else unpack_mask(words, V)
        among = np.where(legal, logprobs[row], -np.inf)
        token = int(among.argmax())
        if rng is not None:
            probs = np.exp(among - among.max()).astype(np.float64)
            token = int(rng.choice(V, p=probs / probs.sum()))
        probs = np.exp(logprobs[row].astype(np.float64))
        return RowCandidate(token, float(probs[token]), float(-(probs * logprobs[row]).sum()))

    return judge


def answer(
    state: GrammarState, rng: np.random.Generator, length: int, budget: int, rule: RunRule
) -> list[int]:
    """Of noise, block by block, each row decided anew until it is revealed."""
    state, tokens = state.copy(), []
    while len(tokens) < budget and not state.has_ended:
        revealed: list[int] = []
        while len(revealed) < min(length, budget - len(tokens)) and not state.has_ended:
            judge = judge_of(noise(rng, length, rng.choice([1.0, 12.0])), rng)
            left = budget - len(tokens) - len(revealed)
            found, _ = reveal_run(state, judge, len(revealed), length, left, rule, EOS)
            assert found
            revealed += found
        tokens += revealed
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid_and_fit(name: str) -> None:
    state = start(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMAS[name])))
    needed = find_completion(state, 300)
    assert needed is not None
    rng = np.random.default_rng(len(name))
    for length, more in ((4, 0), (4, 60), (32, 1), (32, 90)):
        rule = RunRule(int(rng.integers(1, 5)), float(rng.choice([0.02, NEVER])), NO_BOUND)
        tokens = answer(state, rng, length, len(needed) + more, rule)
        assert len(tokens) <= len(needed) + more
        jsonschema.validate(json.loads(text_of(tokens)), SCHEMAS[name])


def letters(*probabilities: float) -> np.ndarray:
    """[L, V] fp32: each row's first letter has this probability, the rest is even."""
    rows = np.full((len(probabilities), V), -np.inf)
    for row, probability in enumerate(probabilities):
        rows[row] = np.log((1 - probability) / (V - 1))
        rows[row, LETTER] = np.log(probability)
    return rows.astype(np.float32)


(LETTER,) = start('start: "a"').forced_tokens()[:1]
LETTERS = r"start: /[a-c]{4,40}/"


@pytest.mark.parametrize(
    ("rule", "length"),
    [
        (RunRule(1, 0.6, NO_BOUND), 2),  # 0.9, 0.7, and 0.5 breaks it
        (RunRule(1, 0.8, NO_BOUND), 1),
        (RunRule(1, NEVER, NO_BOUND), 1),
        (RunRule(4, NEVER, NO_BOUND), 4),
        (RunRule(3, 0.95, NO_BOUND), 3),
        (RunRule(1, NEVER, 100.0), 6),
        (RunRule(1, 0.3, NO_BOUND, part_length=2), 2),
        (RunRule(3, 0.3, NO_BOUND, part_length=2), 4),
        (RunRule(1, 0.3, NO_BOUND, part_length=4, block_offset=3), 1),
    ],
)
def test_how_far_a_run_goes(rule: RunRule, length: int) -> None:
    rows = letters(0.9, 0.7, 0.5, 0.9, 0.9, 0.9)
    state = start(LETTERS)
    assert reveal_run(state, judge_of(rows), 0, 6, 40, rule, EOS) == ([LETTER] * length, False)


def test_what_is_forced_belongs_to_the_run() -> None:
    state = start('start: /[a-c]/ "xyz" /[a-c]/')
    rule = RunRule(1, 0.6, NO_BOUND)
    tokens, _ = reveal_run(state, judge_of(letters(*[0.5] * 6)), 0, 6, 40, rule, EOS)
    assert text_of(tokens) == "axyz"


def test_a_token_that_could_not_be_closed_gives_way() -> None:
    state = start('start: "a"+ "b" | "c"')
    rule = RunRule(1, 0.6, NO_BOUND)
    tokens: list[int] = []
    while not state.has_ended and len(tokens) < 3:
        judge = judge_of(letters(*[0.99] * 6))
        tokens += reveal_run(state, judge, len(tokens), 6, 3 - len(tokens), rule, EOS)[0]
    assert text_of(tokens) in ("aab", "ab")


def test_nothing_is_legal() -> None:
    state = start('start: "a"', exclusions=Exclusions(V, None, frozenset({(LETTER,)})))
    with pytest.raises(StuckError):
        reveal_run(state, judge_of(letters(0.9)), 0, 1, 9, RunRule(1, 0.5, NO_BOUND), EOS)
