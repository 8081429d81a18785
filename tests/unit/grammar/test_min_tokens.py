"""`min_tokens` beside a grammar: no stop token before, as long as the answer can go on. A form that
has a short answer is found to have one."""

import json
import re
from collections.abc import Iterator
from itertools import chain, combinations, combinations_with_replacement, product

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from

from tests.unit.grammar.canvases import (
    EOS,
    V,
    answer,
    answer_of,
    grammars,
    normalised,
    of_schema,
    text_of,
)
from vllm_dllm.grammar.completion import find_completion, find_shortest_completion
from vllm_dllm.grammar.masks import has_token
from vllm_dllm.grammar.patterns import mend_patterns
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
