"""An answer is closed within its tokens, what that takes is known beforehand, and `min_tokens`
holds as long as the answer can go on."""

import json
import re
from collections.abc import Iterator
from itertools import chain, combinations, combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from

from checkpoints.recipes.exact_match import read_rows
from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import (
    EOS,
    SCHEMAS,
    V,
    answer,
    answer_of,
    grammars,
    noise,
    normalised,
    of_schema,
    rows_of,
    start,
    text_of,
    tokenizer,
)
from vllm_dllm.grammar import completion
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.completion import (
    complete_by_exploring,
    find_completion,
    find_shortest_completion,
    search_shortest_first,
)
from vllm_dllm.grammar.masks import has_token
from vllm_dllm.grammar.patterns import mend_patterns
from vllm_dllm.grammar.state import GrammarState

# Fewest tokens by hand, in the shipped vocabulary, which has `{"`, `": "`, `", "` and others.
SHORTEST = {
    "person": 8,  # {" name ": " ", " age ": 0 }
    "any object": 2,
    "anything": 1,
    "list of integers": 2,
    "pair": 5,
    "nothing required": 2,
}


@pytest.mark.parametrize("name", SHORTEST)
def test_the_shortest_answer_is_found(name: str) -> None:
    tokens = find_shortest_completion(of_schema(SCHEMAS[name]), 100)
    assert tokens is not None and len(tokens) == SHORTEST[name], text_of(tokens or [])


def test_what_a_model_writes_fits_its_own_tokens() -> None:
    """With spaces, for which the tokenizer has tokens as `": "`, JSON may take fewer than without;
    the fewest were once sought without."""
    for row in read_rows(CHECKPOINTS / "held_out.jsonl"):
        if row["task"] != "write_json":
            continue
        values = json.loads(row["answer"])
        kinds = {key: "integer" if isinstance(values[key], int) else "string" for key in values}
        schema = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in kinds.items()},
            "required": list(values),
            "additionalProperties": False,
        }
        tokens = tokenizer().tokenize_str(row["answer"])
        assert find_completion(of_schema(schema), len(tokens)) is not None


def test_spaces_that_are_part_of_a_value_stay_away() -> None:
    """`","` is spelt `", "` only where that is another way of writing the same."""
    tokens = find_completion(of_schema({"const": 'a","b'}), 20)
    assert tokens is not None and json.loads(text_of(tokens)) == 'a","b'


def test_a_completion_depends_on_the_state_alone() -> None:
    """What one block was told can be closed must be closed by the next one, which asks anew."""
    state = of_schema(SCHEMAS["order"])
    tokens = tokenizer().tokenize_str('{"id": 7, "lines": [{"item": "bel')
    assert state.consume_tokens(tokens) == len(tokens)
    again = of_schema(SCHEMAS["order"])
    for token in tokens:
        again.consume_token(token)
    assert find_completion(state, 40) == find_completion(again, 40)


def test_a_long_form_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that cut an array which had to be long once searched its end several times anew,
    for seconds in which nobody's step went on."""
    state = of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 24})
    needed, searches = find_completion(state, 200), 0
    assert needed is not None

    def counted(*args: Any) -> list[int] | None:
        nonlocal searches
        searches += 1
        return complete_by_exploring(*args)

    monkeypatch.setattr(completion, "complete_by_exploring", counted)
    rng, left, num_cut = np.random.default_rng(0), len(needed) + 20, 0
    while left > 0 and not state.has_ended:
        for _ in range(3):  # steps of a block of 16
            found = constrain_canvas(state, rows_of(noise(rng, 16, 3.0)), left, EOS)
            num_cut += found.is_cut
        for token in found.path.tokens:
            assert state.consume_token(token)
        left -= len(found.path.tokens)
    assert (state.has_ended or state.is_complete()) and num_cut > 8 and searches <= 2


@pytest.mark.parametrize("spare", [0, 40], ids=["cut", "let through"])
def test_the_next_block_falls_back_on_the_plan(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Where a search gives up, an answer was once left open that the block before could close."""
    state = of_schema(SCHEMAS["order"])
    needed = find_completion(state, 200)
    assert needed is not None
    most = len(needed) + spare
    rows = rows_of(noise(np.random.default_rng(1), 8, 3.0))
    path = constrain_canvas(state, rows, most, EOS).path.tokens
    assert len(path) == 8 and all(state.consume_token(token) for token in path)
    for search in ("complete_greedily", "complete_by_exploring", "search_shortest_first"):
        monkeypatch.setattr(completion, search, lambda *args: None)
    tokens = find_completion(state, most - 8)
    assert tokens is not None
    end = state.copy()
    assert end.consume_tokens(tokens) == len(tokens) and end.is_complete()
    for i, token in enumerate(tokens):  # to where there is a choice
        assert state.plan == tokens[i:]
        others = [t for t in range(7, 490) if t != token and state.allows_token(t)]
        if i and others:
            break
        assert state.consume_token(token)
    assert state.consume_token(others[0]) and state.plan is None


def test_the_search_ends() -> None:
    state = start(grammar_from("regex", "(a|bc){50}b"))
    tokens = find_completion(state, 60)
    assert tokens is not None and text_of(tokens) == "a" * 50 + "b"
    assert search_shortest_first(state, 20) is None


@pytest.mark.parametrize(
    ("regex", "answer"),
    [("([a-z]+ ){8}end", "([a-z]+ ){8}end"), ("[A-Z]+z", "[A-Z]z"), ("[a-y ]*\\nz", "\nz")],
)
def test_what_ends_is_found_among_what_goes_on(regex: str, answer: str) -> None:
    tokens = find_completion(start(grammar_from("regex", regex)), 60)
    assert tokens is not None and re.fullmatch(answer, text_of(tokens))


def test_a_path_is_cut_as_late_as_possible() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    rows = rows_of(noise(np.random.default_rng(0), 16, 3.0))
    free = constrain_canvas(of_schema(schema), rows, 1000, EOS).path.tokens
    cut = constrain_canvas(of_schema(schema), rows, 16, EOS)
    kept = sum(1 for a, b in zip(free, cut.path.tokens, strict=False) if a == b)
    assert len(cut.path.tokens) <= 16 and kept >= len(cut.path.tokens) - 4


def test_an_answer_that_cannot_fit_stays_open() -> None:
    state = of_schema(SCHEMAS["person"])
    found = constrain_canvas(state, rows_of(noise(np.random.default_rng(0), 4, 3.0)), 4, EOS)
    assert len(found.path.tokens) == 4 and not found.ended


OTHER_STOP = 300
WORDS = "[a-z]{1,3}( [a-z]{1,3})*"


def start_regex(regex: str, min_tokens: int, stops: frozenset[int] = frozenset()) -> GrammarState:
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
    tokens = end_of(start_regex(WORDS, min_tokens), length=16)
    assert re.fullmatch(WORDS, text_of(tokens))
    # One character more where the last one may not be a space.
    assert tokens.index(EOS) in (max(min_tokens, 1), min_tokens + 1)


@pytest.mark.parametrize(("regex", "text"), [("yes|no", "yes|no"), ("ab|abcdef", "abcdef")])
def test_a_form_that_cannot_go_on_ends(regex: str, text: str) -> None:
    tokens = end_of(start_regex(regex, 30), length=8)
    assert tokens[-1] == EOS and re.fullmatch(text, text_of(tokens))


def test_noise() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        tokens = answer(start_regex(WORDS, 24), rng, 16, 48, scale=3.0)
        assert re.fullmatch(WORDS, text_of(tokens))
        assert EOS not in tokens[:24] and len(tokens) >= 24


def test_every_stop_token_waits() -> None:
    state = start_regex("a+", 2, frozenset({OTHER_STOP}))
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
    tokens = find_completion(start_regex(WORDS, 20), 40)
    assert tokens is not None and 20 <= len(tokens) <= 40
    assert find_completion(start_regex("[a-z]", 20), 40) is not None


FORMATS = (
    *("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri", "duration"),
)
PATTERNS = (
    "^[a-z]+$",
    "^[0-9]{3,9}$",
    "^[A-Z]{2}[0-9]{2}(-[A-F0-9]{4}){4}$",
    "^([a-z]+ ){8}end$",
    "^(a|bc){50}b$",
    "^(a{90}|b)c$",
    "^(a{30}b{30}c{30}|x+y|[0-9]{40})z$",
    "^(long first branch of words|other long branch|z)[!?]$",
    r"^([a-z]+\.)*[a-z]+@([a-z]+\.)+z$",
    "^#?([a-f0-9]{6}|[a-f0-9]{3})$",
)
MOST = 200


def of(*strings: dict[str, str]) -> dict:
    properties = {f"p{i}": {"type": "string", **string} for i, string in enumerate(strings)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def require_answer(schema: dict) -> None:
    state = of_schema(mend_patterns(schema))
    tokens = find_completion(state, MOST)
    assert tokens is not None and len(tokens) <= MOST, schema
    json.loads(text_of(tokens))


NAMED = [{"format": name} for name in FORMATS] + [{"pattern": pattern} for pattern in PATTERNS]


ALL_FORMATS = NAMED[: len(FORMATS)]


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(zip(NAMED, NAMED, strict=True), id="each with itself"),
        pytest.param(combinations(NAMED, 2), id="pairs", marks=pytest.mark.slow),
        pytest.param(
            combinations_with_replacement(ALL_FORMATS, 3),
            id="triples of formats",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            chain(product(NAMED, repeat=2), product(ALL_FORMATS, repeat=3)),
            id="any order",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_strings_beside_each_other(beside: Iterator[tuple[dict[str, str], ...]]) -> None:
    for strings in beside:
        require_answer(of(*strings))


def test_beside_other_values() -> None:
    schema = of(*({"format": name} for name in ("date-time", "email", "uuid")))
    more = {"count": {"type": "integer"}, "is_on": {"type": "boolean"}}
    schema["properties"] |= more
    schema["required"] += more
    require_answer(schema)
    short = of({"format": "email"}, {"format": "date"})
    require_answer({"type": "array", "items": short, "minItems": 3})


@pytest.mark.parametrize(("pattern", "most"), [("^(a{90}|b)c$", 9), ("^(a|bc){50}b$", 60)])
def test_detours_are_left_out(pattern: str, most: int) -> None:
    tokens = find_shortest_completion(of_schema(of({"pattern": pattern})), MOST)
    assert tokens is not None and len(tokens) <= most, text_of(tokens)


def test_from_amid_an_answer() -> None:
    text = LLMatcher.grammar_from_json_schema(of({"format": "email"}, {"format": "date"}))
    state: GrammarState = grammars().start_state(text, frozenset())
    begun = grammars().vocabulary.tokenizer.tokenize_str('{"p0": "uma.b@exa')
    assert state.consume_tokens(begun) == len(begun)
    assert find_completion(state, 40) is not None
