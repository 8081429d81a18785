"""`min_tokens` beside a grammar: no stop token before, as long as the answer can go on."""

import re

import numpy as np
import pytest
from llguidance import grammar_from

from tests.unit.grammar.canvases import EOS, V, answer, answer_of, grammars, normalised, text_of
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.rows import has_token
from vllm_dllm.grammar.state import GrammarState

OTHER_STOP = 300
WORDS = "[a-z]{1,3}( [a-z]{1,3})*"


def start(regex: str, min_tokens: int, stops: frozenset[int] = frozenset()) -> GrammarState:
    return grammars().start_state(grammar_from("regex", regex), stops, None, min_tokens)


def end_of(state: GrammarState, length: int) -> list[int]:
    """The tokens of an answer whose model finds a stop token most probable everywhere."""
    rng = np.random.default_rng(0)

    def draw_logprobs() -> np.ndarray:
        logits = rng.normal(size=(length, V))
        logits[:, EOS] += 12
        return normalised(logits)

    return answer_of(state, draw_logprobs, max_tokens=64)


@pytest.mark.parametrize("min_tokens", [0, 1, 7, 16, 40])
def test_an_answer_is_as_long_as_it_must_be(min_tokens: int) -> None:
    tokens = end_of(start(WORDS, min_tokens), length=16)
    assert re.fullmatch(WORDS, text_of(tokens))
    # One character more where the last one may not be a space.
    assert tokens.index(EOS) in (max(min_tokens, 1), min_tokens + 1)


@pytest.mark.parametrize(("regex", "text"), [("yes|no", "yes|no"), ("ab|abcdef", "abcdef")])
def test_a_form_that_cannot_go_on_ends(regex: str, text: str) -> None:
    tokens = end_of(start(regex, 30), length=8)
    assert tokens[-1] == EOS and re.fullmatch(text, text_of(tokens))


def test_noise() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        tokens = answer(start(WORDS, 24), rng, 16, 48, scale=3.0)
        assert re.fullmatch(WORDS, text_of(tokens))
        assert EOS not in tokens[:24] and len(tokens) >= 24


def test_every_stop_token_waits() -> None:
    state = start("a+", 2, frozenset({OTHER_STOP}))
    a = grammars().vocabulary.token_by_bytes[b"a"]
    for _ in range(2):
        assert not any(
            has_token(state.compute_mask(), stop) or state.allows_token(stop)
            for stop in state.stops
        )
        assert not state.consume_token(OTHER_STOP) and not state.is_complete()
        assert state.consume_token(a)
    assert all(
        has_token(state.compute_mask(), stop) and state.allows_token(stop) for stop in state.stops
    )
    assert state.is_complete() and state.consume_token(OTHER_STOP)


def test_a_completion_is_long_enough() -> None:
    tokens = find_completion(start(WORDS, 20), 40)
    assert tokens is not None and 20 <= len(tokens) <= 40
    assert find_completion(start("[a-z]", 20), 40) is not None
