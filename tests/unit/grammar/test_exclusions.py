"""What a request excludes is in no answer, and the answers are still valid."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import grammar_from

from tests.unit.grammar.canvases import (
    EOS,
    SCHEMAS,
    V,
    answer,
    drafted,
    grammars,
    of_schema,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.completion import find_shortest_completion
from vllm_dllm.grammar.masks import Exclusions, unpack_mask
from vllm_dllm.grammar.state import GrammarState

PERSON = SCHEMAS["person"]
SEEDS = 30


def token(character: str) -> int:
    (found,) = tokenizer().tokenize_str(character)
    return found


def only(characters: str) -> Exclusions:
    return Exclusions(V, frozenset({EOS, *map(token, characters)}), frozenset())


def never(*words: tuple[int, ...]) -> Exclusions:
    return Exclusions(V, None, frozenset(words))


def test_a_mask_has_what_is_not_excluded() -> None:
    exclusions = Exclusions(V, frozenset(range(5, 300)), frozenset({(7,), (8, 9), (5, 8, 10)}))
    for before in ([], [8], [9, 8], [5, 8]):
        words = np.full((V + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
        exclusions.remove_from_(words, before)
        expected = [t for t in range(V) if not exclusions.excludes(t, before)]
        assert np.flatnonzero(unpack_mask(words, V)).tolist() == expected
    assert exclusions.excludes(9, [8]) and not exclusions.excludes(9, [5])
    assert exclusions.excludes(10, [5, 8]) and not exclusions.excludes(10, [6, 8])
    assert exclusions.excludes(7, []) and exclusions.excludes(4, [])


@pytest.mark.slow
def test_answers_are_valid_without_what_is_excluded() -> None:
    """Half of the tokens of several characters, and pairs that the answer would have had."""
    characters, answered = set(grammars().vocabulary.characters.tolist()), 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        free = answer(of_schema(PERSON), np.random.default_rng(seed), 32, 60, 3.0)
        pairs = [pair for pair in pairwise(free) if EOS not in pair]
        pairs = [pairs[i] for i in rng.integers(0, len(pairs), size=2)]
        others = [(t,) for t in range(7, V) if t not in characters and rng.random() < 0.5]
        exclusions = never(*pairs, *others)
        state = of_schema(PERSON, exclusions)
        needed = find_shortest_completion(state, 200)
        if needed is None:
            continue
        answered += 1
        most = len(needed) + int(rng.integers(0, 40))
        tokens = answer(state, np.random.default_rng(seed), 32, most, 3.0)
        assert len(tokens) <= most
        jsonschema.validate(json.loads(text_of(tokens)), PERSON)
        for i, found in enumerate(tokens):
            assert not exclusions.excludes(found, tokens[:i])
    assert answered > 5


@pytest.mark.parametrize("seed", range(5))
def test_a_word_that_cannot_be_spelt_to_its_end_is_not_begun(seed: int) -> None:
    rows = rows_of(drafted(np.random.default_rng(seed), "green", 8, faults=0))
    state = start(grammar_from("choice", '["red", "green"]'), exclusions=only("redg"))
    found = constrain_canvas(state, rows, 100, EOS)
    assert text_of(found.path.tokens) == "red" and found.path.tokens[-1] == EOS and found.ended


def test_words_across_the_end_of_a_canvas() -> None:
    a, b, c = token("a"), token("b"), token("c")
    state = start(grammar_from("regex", "[ab]c?[ab]"), exclusions=never((a, b), (a, c, b)))
    assert state.consume_token(a) and not state.consume_token(b) and state.consume_token(c)
    assert not state.allows_token(b) and state.allows_token(a)
    ahead = state.copy()
    assert not ahead.consume_token(b) and ahead.consume_token(a) and not state.has_ended


def test_what_is_forced_ends_before_what_is_excluded_or_ends_the_answer() -> None:
    matcher: Any = SimpleNamespace(compute_ff_tokens=lambda: [20, 21, 22])

    def forced(exclusions: Exclusions | None, *stops: int) -> list[int]:
        state = GrammarState(matcher, grammars().vocabulary, frozenset(stops), exclusions)
        return state.forced_tokens()

    assert forced(None) == forced(never((21, 20))) == [20, 21, 22]
    assert forced(never((22,))) == [20, 21]
    assert forced(never((20, 21))) == forced(None, 21) == [20]


def test_a_stop_token_that_is_excluded_ends_nothing() -> None:
    stop = 3
    exclusions = Exclusions(V, frozenset({stop, token("a")}), frozenset())
    state = start(grammar_from("regex", "a"), frozenset({stop}), exclusions)
    assert state.stops == {stop} and state.consume_token(token("a"))
    assert np.flatnonzero(unpack_mask(state.compute_mask(), V)).tolist() == [stop]


def test_no_answer_is_found_where_there_is_none() -> None:
    assert find_shortest_completion(of_schema(PERSON, only("{}ab")), 100) is None
    exclusions = only('{}": ,nameg0')
    tokens = find_shortest_completion(of_schema(PERSON, exclusions), 100)
    assert tokens is not None and not any(exclusions.excludes(t, ()) for t in tokens)


def test_noise_never_leads_out_of_the_allowed_tokens() -> None:
    exclusions = only('{}": ,nameg0123xyz')
    for seed in range(5):
        state = of_schema(PERSON, exclusions)
        tokens = answer(state, np.random.default_rng(seed), 16, 60, 3.0)
        assert exclusions.allowed is not None and set(tokens) <= exclusions.allowed
        jsonschema.validate(json.loads(text_of(tokens)), PERSON)
