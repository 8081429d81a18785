"""A form that has a short answer is found to have one, whatever stands beside what in it."""

import json
from collections.abc import Iterator
from itertools import chain, combinations, combinations_with_replacement, product

import pytest
from llguidance import LLMatcher

from tests.unit.grammar.canvases import grammars, of_schema, text_of
from vllm_dllm.grammar.completion import find_completion, find_shortest_completion
from vllm_dllm.grammar.patterns import mend_patterns
from vllm_dllm.grammar.state import GrammarState

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
