"""Patterns of JSON schemas mean what they say."""

import json
import re
import time as clock
from collections.abc import Callable
from datetime import date, datetime, time
from ipaddress import IPv4Address, IPv6Address
from uuid import UUID

import numpy as np
import pytest
from pydantic import EmailStr, TypeAdapter

from tests.unit.grammar.canvases import answer, of_schema, text_of, tokenizer
from vllm_dllm.grammar.completion import find_shortest_completion
from vllm_dllm.grammar.patterns import mend_pattern, mend_patterns, unanchored_lark_regex
from vllm_dllm.grammar.schema_keys import SchemaError

VALUES = ("b", "b\\", 'b"', "b\t", "bb", "bé", "b日", "b-", "ba", "b^", "b]", "b/", "b\x05")
PATTERNS = (
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


@pytest.mark.parametrize("pattern", PATTERNS)
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
