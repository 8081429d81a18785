"""The searches against the cheapest path of all."""

from collections.abc import Callable

import numpy as np
import pytest
from llguidance import grammar_from

from tests import tolerances
from tests.unit.grammar.canvases import (
    QUOTE,
    RegexAutomaton,
    drafted,
    noise,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from tests.unit.grammar.reference import best_path
from vllm_dllm.grammar.best_first_search import beam_search, best_first_search
from vllm_dllm.grammar.canvas import MAX_WALK_COST_NATS, find_cheap_path
from vllm_dllm.grammar.walk import walk_best_guesses

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
            excess.append(find_cheap_path(state, rows, L)[0].cost_nats - least)
            walked.append(walk_best_guesses(state, rows, L).cost_nats - least)
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
                found = best_first_search(state, rows, L, [])
                if found is None:
                    continue
                num_found += 1
                assert found[1] == pytest.approx(
                    best_path(automaton, logprobs)[1], rel=0, abs=tolerances.BEAM_NATS
                )
    assert num_found > 12
    flat = rows_of(noise(rng, L, 0.1))
    assert (
        best_first_search(start(grammar_from("regex", LANGUAGES["words"][0])), flat, L, []) is None
    )


def test_a_quotation_mark_too_early_is_taken_back() -> None:
    regex, texts = LANGUAGES["object"]
    logprobs = drafted(np.random.default_rng(0), texts[1], L, faults=0)
    right = tokenizer().tokenize_str(texts[1])[4]  # the space in "Zoe the queen"
    logprobs[4] = np.log(1e-4)
    logprobs[4, QUOTE], logprobs[4, right] = np.log(0.9), np.log(0.05)
    rows = rows_of(logprobs)
    walked = walk_best_guesses(start(grammar_from("regex", regex)), rows, L)
    found, end = find_cheap_path(start(grammar_from("regex", regex)), rows, L)
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
    find(state, rows, L, walk_best_guesses(state.copy(), rows, L).tokens[:known])
    np.testing.assert_array_equal(state.compute_mask(), before)
