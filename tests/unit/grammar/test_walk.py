"""Whatever the logits are, what a canvas stands for is legal; the searches against the cheapest
path of all."""

import json
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    drafted,
    grammars,
    noise,
    normalised,
    of_schema,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from tests.unit.grammar.reference import best_path, plain_walk
from vllm_dllm.grammar.canvas import MAX_WALK_COST_NATS, constrain_canvas, find_cheap_path
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.path_search import beam_search, best_first_search
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


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict:
    simple = ["string", "integer", "number", "boolean", "null"]
    kind = draw(st.sampled_from(simple + (["object", "array", "enum"] if depth else [])))
    if kind == "enum":
        words = st.text('abc "\\é', min_size=1, max_size=4)
        return {"enum": draw(st.lists(words, min_size=1, max_size=4, unique=True))}
    if kind == "array":
        low = draw(st.integers(0, 2))
        return {"type": "array", "items": draw(schemas(depth - 1)), "minItems": low}
    if kind == "object":
        names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
        return {
            "type": "object",
            "properties": {name: draw(schemas(depth - 1)) for name in names},
            "required": draw(st.lists(st.sampled_from(names), unique=True)) if names else [],
            "additionalProperties": draw(st.booleans()),
        }
    return {"type": kind}


@settings(max_examples=40, deadline=None)
@given(schemas(), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 3.0, 15.0]))
def test_every_answer_is_valid(schema: dict, seed: int, scale: float) -> None:
    state, rng = of_schema(schema), np.random.default_rng(seed)
    budget = len(find_completion(state, 200) or []) + int(rng.integers(0, 40))
    tokens = answer(state, rng, int(rng.choice([1, 7, 32])), budget, scale)
    assert len(tokens) <= budget
    jsonschema.validate(json.loads(text_of(tokens)), schema)


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
