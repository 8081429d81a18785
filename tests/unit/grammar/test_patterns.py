"""Patterns of JSON schemas mean what they say; grammars that cannot be used are refused in plain
words, and do not take long."""

import json
import re
import time as clock
from collections.abc import Callable
from datetime import date, datetime, time
from ipaddress import IPv4Address, IPv6Address
from uuid import UUID

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from
from pydantic import EmailStr, TypeAdapter

from tests.unit.grammar.canvases import ENDLESS, answer, of_schema, start, text_of, tokenizer
from vllm_dllm.grammar.compiler import (
    GrammarError,
    check_joined_patterns,
    check_lark,
    check_schema_size,
)
from vllm_dllm.grammar.completion import find_completion, find_shortest_completion
from vllm_dllm.grammar.patterns import mend_pattern, mend_patterns, unanchored_lark_regex
from vllm_dllm.grammar.schema_keys import SchemaError

VALUES = ("b", "b\\", 'b"', "b\t", "bb", "bé", "b日", "b-", "ba", "b^", "b]", "b/", "b\x05")
CLASSES = (
    r"^b[^\\]$",
    r'^b[^"]$',
    r'^b[^\\"]*$',
    r"^b[^\x5c]$",
    r"^b[^\]\\]$",
    r"^b[^^\\]$",
    r"^b[^-a]$",
    r'^b[^a-z"-]$',
    r"^b[\^a]$",
    r"^b[a^]$",
    r"^(b|[^\\])*$",
)


def accepts(schema: dict, text: str) -> bool:
    state, tokens = of_schema(schema), tokenizer().tokenize_str(text)
    return state.consume_tokens(tokens) == len(tokens) and state.is_complete()


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_pattern_means_what_it_says(pattern: str) -> None:
    """As Python reads it. Answers once broke `[^<>\\]`."""
    schema = {"type": "string", "pattern": mend_pattern(pattern)}
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(schema, text) == bool(re.search(pattern, value)), value


@pytest.mark.parametrize("bracket", ["[", "[^", "[^a", "[\\\\"])
def test_classes_that_never_end_are_read_once(bracket: str) -> None:
    pattern = bracket * (60_000 // len(bracket))
    begin = clock.process_time()
    assert mend_pattern(rf"^[^a]{pattern}") == rf"^[^\x00[a]]{pattern}"
    with pytest.raises(SchemaError, match="cannot be used"):
        unanchored_lark_regex(f"^{pattern}", "#")
    assert clock.process_time() - begin < 5  # minutes, from each bracket to the end


def test_llguidance_still_needs_it() -> None:
    assert accepts({"type": "string", "pattern": r"^b[^\\]$"}, r'"b\\"'), "no need to mend it more"


def test_patterns_are_found_where_schemas_have_them() -> None:
    mended = mend_pattern("[^a]")
    schema = {
        "properties": {
            "pattern": {"type": "string", "pattern": "[^a]"},
            "default": {"pattern": "[^a]"},
        },
        "patternProperties": {"[^a]": {"items": [{"pattern": "[^a]"}]}},
        "enum": [{"pattern": "[^a]"}],
    }
    found = mend_patterns(schema)
    assert found == {
        "properties": {
            "pattern": {"type": "string", "pattern": mended},
            "default": {"pattern": mended},
        },
        "patternProperties": {mended: {"items": [{"pattern": mended}]}},
        "enum": [{"pattern": "[^a]"}],
    }
    assert mend_patterns(found) == found


READERS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "uuid": UUID,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "email": TypeAdapter(EmailStr).validate_python,
}
NOT_READ = {
    "date": ("0000-01-01", "2021-02-29"),
    "time": ("23:59:60Z", "00:00:00z"),
    "date-time": ("0000-01-01T00:00:00Z", "2020-01-01t00:00:00Z"),
    "email": (
        "x@x",
        "Vera@[0.1.2.33]",
        "a@b.1",
        "a..b@c.de",
        f"{'a' * 65}@b.cd",
        f"a@{'b.' * 126}cd",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_formats_are_what_python_reads(name: str) -> None:
    """The year 0 was once forced, which no reader takes."""
    schema = mend_patterns({"type": "string", "format": name})
    state = of_schema(schema)
    closed = find_shortest_completion(state, 60)
    assert closed is not None
    noise = (answer(state, np.random.default_rng(seed), 32, 80, 3.0) for seed in range(8))
    for tokens in (closed, *noise):
        READERS[name](json.loads(text_of(tokens)))
    for text in NOT_READ.get(name, ()):
        assert not accepts(schema, json.dumps(text))
    both = mend_patterns({"type": "string", "format": name, "allOf": [{"pattern": "1"}]})
    found = find_shortest_completion(of_schema(both), 60)
    assert found is not None and "1" in text_of(found)


def of_json(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


WRONG = {
    "no value": (of_json({"enum": []}), "Unsatisfiable schema"),
    "lengths": (of_json({"type": "string", "minLength": 5, "maxLength": 3}), "minLength (5)"),
    "reference to nowhere": (of_json({"$ref": "http://x/y"}), "http://x/y"),
    "look-ahead": (grammar_from("regex", "(?=a)b"), "look-ahead"),
    "rule of itself": (grammar_from("grammar", "start: start"), "no text satisfies it"),
    "reference to itself": (of_json({"$ref": "#"}), "no text satisfies it"),
    "no such rule": (grammar_from("grammar", "start: a"), "unknown name"),
    "regex that explodes": (grammar_from("regex", "(ab|c)?" * 1000), "lexer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grammar_is_refused(name: str) -> None:
    text, complaint = WRONG[name]
    with pytest.raises(GrammarError, match=complaint.replace("(", r"\(").replace(")", r"\)")) as e:
        start(text)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def chain(length: int) -> dict:
    """Definitions, each of which refers to the next one."""
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {}}}


TOO_LARGE = {
    "definitions": (chain(2000), r"#/\$defs must have at most 300 entries, got 2001"),
    "alternatives": (
        {"items": {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(4000)]}},
        "#/items/anyOf must have at most",
    ),
    "of a key's name": (
        {"properties": {"default": {"allOf": [{}] * 301}}},
        "#/properties/default/allOf must have at most",
    ),
    "repetitions": (
        {"type": "array", "minItems": 10_000_000},
        "#/minItems must be at most 10000, got 10000000",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_schemas_that_stop_llguidance_are_refused_before(name: str) -> None:
    schema, complaint = TOO_LARGE[name]
    with pytest.raises(GrammarError, match=complaint):
        check_schema_size(schema)


def test_schemas_at_the_limit_compile() -> None:
    for schema in (
        {"type": "object", "properties": {f"p{i}": {} for i in range(300)}},
        chain(299),
        {"enum": [f"word {i}" for i in range(3000)]},
        {"type": "array", "minItems": 10_000},
    ):
        check_schema_size(schema)
        start(of_json(schema))


PATTERNS: list[dict] = [{"pattern": f"[a-z]{{{i}}}x"} for i in range(1, 20)]
TEXT: dict = {"type": "string"}
SEVERAL = TEXT
for _pattern in PATTERNS:
    SEVERAL = {"anyOf": [SEVERAL], **_pattern}
LINKS = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} | PATTERNS[i] for i in range(19)}
JOINED_LARK = "start: T\nT: " + " & ".join(f"/(.*)x{{{i}}}(.*)/" for i in range(1, 19))
JOINED = {
    "all": ({"items": TEXT | {"allOf": PATTERNS}}, "#/items must not join more than 16 patterns"),
    "of a property": (
        {"allOf": [{"properties": {"pattern": one}} for one in PATTERNS]},
        "# must not join more than 16",
    ),
    "beside references": (
        {"$ref": "#/$defs/d0", "$defs": LINKS | {"d19": TEXT}},
        r"#/\$defs/d0 must not join more than 16",
    ),
    "beside alternatives": (SEVERAL, "must not join more than 16"),
    "of a tag": (
        {"format": {"type": "json_schema", "json_schema": {"allOf": PATTERNS}}},
        "#/format/json_schema must not join",
    ),
    "of a tag's grammar": (
        {"format": {"type": "grammar", "grammar": JOINED_LARK}},
        "at most 16 signs &, got 17",
    ),
    "long": (TEXT | {"pattern": "a" * 20_000}, "at most 16384 bytes, got 20000"),
}


@pytest.mark.parametrize("name", JOINED)
def test_patterns_that_would_take_an_hour_are_refused_before(name: str) -> None:
    schema, complaint = JOINED[name]
    with pytest.raises(GrammarError, match=complaint):
        check_joined_patterns(schema)


def test_grammars_with_schemas_inside_are_refused_before() -> None:
    for schema, complaint in (
        (json.dumps({"allOf": PATTERNS}), "# must not join"),
        (json.dumps({"properties": {f"p{i}": {} for i in range(301)}}), "at most 300 entries"),
        ("[" * 7000, "nested too deeply"),
    ):
        with pytest.raises(GrammarError, match=complaint):
            check_lark(f"start: %json {schema}")
    with pytest.raises(GrammarError, match="signs &"):
        check_lark(JOINED_LARK)


def test_many_patterns_that_do_not_meet_are_admitted() -> None:
    for schema in (
        {"properties": {f"p{i}": TEXT | one for i, one in enumerate(PATTERNS)}},
        {"anyOf": PATTERNS},
        {"properties": {"pattern": {"allOf": PATTERNS[:16]}}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": PATTERNS}}},
        {"enum": [{"allOf": PATTERNS}]},
        True,
        5,
    ):
        check_joined_patterns(schema)
    check_lark('start: "&&" | "%json" | %json {"type": "null"} | %json nonsense')


@pytest.mark.parametrize(
    "text",
    [
        grammar_from("grammar", 'start: "a" start'),
        grammar_from("grammar", 'start: "(" start ")"'),
        of_json(ENDLESS),
        grammar_from("regex", "(a?){2000}a{2000}"),
        grammar_from("regex", "(a{1,1000}){1,1000}b"),
    ],
    ids=["endless rule", "never closed", "endless reference", "explodes late", "explodes at once"],
)
def test_endless_grammars_have_no_completion(text: str) -> None:
    assert find_completion(start(text), 4096) is None


@pytest.mark.parametrize("regex", ["(a+)+b", "(a|b)*a(a|b){20}"])
def test_regexes_that_hang_others_are_harmless(regex: str) -> None:
    tokens = find_completion(start(grammar_from("regex", regex)), 4096)
    assert tokens is not None
