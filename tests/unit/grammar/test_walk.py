"""Whatever the logits are, what a canvas stands for is legal, without what a request excludes; the
searches against the cheapest path of all."""

import json
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import grammar_from

from tests import tolerances
from tests.unit.grammar.canvases import (
    EOS,
    QUOTE,
    SCHEMAS,
    K,
    RegexAutomaton,
    V,
    answer,
    best_path,
    drafted,
    grammars,
    noise,
    normalised,
    of_schema,
    plain_walk,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from vllm_dllm.grammar.canvas import MAX_WALK_COST_NATS, constrain_canvas, find_cheap_path
from vllm_dllm.grammar.completion import find_shortest_completion
from vllm_dllm.grammar.masks import Exclusions, unpack_mask
from vllm_dllm.grammar.path_search import beam_search, best_first_search
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.walk import MAX_SPACES, walk_best_guesses

PERSON = SCHEMAS["person"]
EMMA = '{"name": "Emma", "age": 71}'


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("k", [1, K])
def test_a_walk_takes_the_best_legal_token_of_each_row(scale: float, k: int) -> None:
    for seed in range(10):
        logprobs = noise(np.random.default_rng(seed), 24, scale)
        path = walk_best_guesses(of_schema(PERSON), rows_of(logprobs, k))
        assert path.tokens == plain_walk(of_schema(PERSON), logprobs)


def test_a_right_answer_costs_nothing_and_keeps_its_rows() -> None:
    logprobs = drafted(np.random.default_rng(0), EMMA, 24, faults=0, sure=20.0)
    found = constrain_canvas(of_schema(PERSON), rows_of(logprobs), 100, EOS)
    assert text_of(found.path.tokens) == EMMA and found.path.tokens[-1] == EOS
    assert found.ended and found.path.cost_nats == 0
    # Only the stop token, which the grammar had to be asked about.
    assert set(found.path.masks) == {len(found.path.tokens) - 1}


def test_the_path_gives_its_rows_log_probabilities() -> None:
    logprobs = drafted(np.random.default_rng(3), EMMA, 24, faults=3)
    path = constrain_canvas(of_schema(PERSON), rows_of(logprobs), 100, EOS).path
    rows = np.arange(len(path.tokens))
    np.testing.assert_array_equal(path.logprobs, logprobs[rows, path.tokens])
    best = logprobs.max(axis=1)[rows].astype(np.float64)
    assert path.cost_nats == pytest.approx((best - np.array(path.logprobs)).sum())


def test_what_is_forced_is_marked() -> None:
    state = start(grammar_from("choice", '["red", "green"]'))
    path = walk_best_guesses(state, rows_of(noise(np.random.default_rng(0), 8, 1.0)))
    assert text_of(path.tokens) in ("red", "green")
    # The first letter is free, unless the word is one token; the others follow from it.
    assert path.forced == set(range(1, len(path.tokens)))


def test_a_state_and_its_copy_go_their_own_ways() -> None:
    state = of_schema(PERSON)
    tokens = tokenizer().tokenize_str(EMMA)
    state.consume_tokens(tokens[:3])
    before = state.compute_mask()
    ahead = state.copy()
    assert ahead.consume_tokens(tokens[3:]) == len(tokens) - 3 and ahead.is_complete()
    np.testing.assert_array_equal(state.compute_mask(), before)
    assert not state.is_complete() and not state.consume_token(EOS) and ahead.consume_token(EOS)


def test_a_rejected_token_changes_nothing() -> None:
    state = of_schema(PERSON)
    before = state.compute_mask()
    brace = tokenizer().tokenize_str("}")[0]
    assert not state.consume_token(brace) and state.consume_tokens([brace]) == 0
    np.testing.assert_array_equal(state.compute_mask(), before)
    assert state.consume_tokens(tokenizer().tokenize_str(EMMA)) > 0


def test_a_stop_token_that_is_text_ends_where_the_text_may_stand() -> None:
    dot = tokenizer().tokenize_str(".")[0]
    state = start(grammar_from("regex", "[a-z.]{5}"), frozenset({dot}))
    state.consume_tokens(tokenizer().tokenize_str("ab"))
    assert not state.is_complete() and state.consume_token(dot) and state.has_ended


def test_whitespace_is_bounded() -> None:
    logits = np.zeros((80, V))
    logits[:, tokenizer().tokenize_str("\n")[0]] = 30.0
    logits[0, tokenizer().tokenize_str("{")[0]] = 60.0
    path = constrain_canvas(of_schema(PERSON), rows_of(normalised(logits)), 500, EOS).path
    assert "\n" * MAX_SPACES in text_of(path.tokens)
    assert "\n" * (MAX_SPACES + 1) not in text_of(path.tokens)


def test_grammars_are_compiled_once_and_forgotten_when_there_are_many() -> None:
    text = grammar_from("regex", "[a-z]+")
    compile_once = grammars()._compile_once
    start(text)
    first = compile_once(text)
    start(text)
    assert compile_once(text) is first
    for i in range(300):
        start(grammar_from("regex", f"[a-z]{{{i}}}"))
    assert compile_once(text) is not first and compile_once.cache_info().currsize <= 256


L = 32
LANGUAGES = {
    "object": (
        r'\{"name": "[a-zA-Z ]{1,20}", "age": [0-9]{1,3}\}',
        ['{"name": "Emma", "age": 71}', '{"name": "Zoe the queen", "age": 5}'],
    ),
    "list": (r"\[[0-9]{1,3}(, [0-9]{1,3}){0,9}\]", ["[1, 22, 333, 4]", "[10, 20, 30, 40, 50, 60]"]),
    "words": (r'("[a-z]{1,8}"(, )?){1,6}', ['"bear", "moon", "rope"', '"cat", "dog"']),
    "date": (r"[0-9]{4}-[0-9]{2}-[0-9]{2}", ["2026-11-22", "1999-01-31"]),
}


@pytest.mark.slow
def test_the_beam_finds_the_cheapest_path() -> None:
    """At least 99% of the canvases within `BEAM_NATS`."""
    rng, excess, walked = np.random.default_rng(7), [], []
    for regex, texts in LANGUAGES.values():
        automaton = RegexAutomaton(regex)
        for _ in range(50):
            text = texts[rng.integers(len(texts))]
            logprobs = drafted(rng, text, L, faults=int(rng.integers(0, 4)))
            _, least = best_path(automaton, logprobs)
            state, rows = start(grammar_from("regex", regex)), rows_of(logprobs)
            excess.append(find_cheap_path(state, rows)[0].cost_nats - least)
            walked.append(walk_best_guesses(state, rows).cost_nats - least)
    excess_nats = np.array(excess)
    assert excess_nats.min() > -tolerances.BEAM_NATS  # or the oracle is none
    assert np.mean(excess_nats < tolerances.BEAM_NATS) >= 0.99
    assert np.mean(np.array(walked) < tolerances.BEAM_NATS) < 0.9, "faults that a walk repairs"


def test_the_cheapest_first_is_right_or_gives_up() -> None:
    """Where it finds a path at all, no path is cheaper, which the beam does not promise."""
    rng, num_found = np.random.default_rng(3), 0
    for regex, texts in LANGUAGES.values():
        automaton = RegexAutomaton(regex)
        for text in texts:
            for faults in (0, 1, 3):
                logprobs = drafted(rng, text, L, faults)
                state, rows = start(grammar_from("regex", regex)), rows_of(logprobs)
                found = best_first_search(state, rows, [])
                if found is None:
                    continue
                num_found += 1
                assert found[1] == pytest.approx(
                    best_path(automaton, logprobs)[1], rel=0, abs=tolerances.BEAM_NATS
                )
    assert num_found > 12
    flat = rows_of(noise(rng, L, 0.1))
    assert best_first_search(start(grammar_from("regex", LANGUAGES["words"][0])), flat, []) is None


def test_a_quotation_mark_too_early_is_taken_back() -> None:
    regex, texts = LANGUAGES["object"]
    logprobs = drafted(np.random.default_rng(0), texts[1], L, faults=0)
    right = tokenizer().tokenize_str(texts[1])[4]  # the space in "Zoe the queen"
    logprobs[4] = np.log(1e-4)
    logprobs[4, QUOTE], logprobs[4, right] = np.log(0.9), np.log(0.05)
    rows = rows_of(logprobs)
    walked = walk_best_guesses(start(grammar_from("regex", regex)), rows)
    found, end = find_cheap_path(start(grammar_from("regex", regex)), rows)
    assert walked.tokens[4] == QUOTE and walked.cost_nats > 5 * MAX_WALK_COST_NATS
    assert found.cost_nats == pytest.approx(np.log(0.9 / 0.05)) and end.has_ended
    assert text_of(found.tokens) == texts[1]


@pytest.mark.parametrize("known", [0, 5])
@pytest.mark.parametrize("find", [beam_search, best_first_search], ids=["beam", "cheapest"])
def test_a_search_leaves_its_start_alone(find: Callable[..., object], known: int) -> None:
    regex, texts = LANGUAGES["object"]
    rows = rows_of(drafted(np.random.default_rng(1), texts[0], L, faults=0))
    state = start(grammar_from("regex", regex))
    before = state.compute_mask()
    find(state, rows, walk_best_guesses(state.copy(), rows).tokens[:known])
    np.testing.assert_array_equal(state.compute_mask(), before)


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
