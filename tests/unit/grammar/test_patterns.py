"""Patterns of JSON schemas mean what they say."""

import json
import re

import pytest

from tests.unit.grammar.canvases import of_schema, tokenizer
from vllm_dllm.grammar.patterns import mend_pattern, mend_patterns

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
    return state.consume_text(tokens) == len(tokens) and state.is_complete()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_says(pattern: str) -> None:
    """As Python reads it. Answers once broke `[^<>\\]`."""
    schema = {"type": "string", "pattern": mend_pattern(pattern)}
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(schema, text) == bool(re.search(pattern, value)), value


def test_llguidance_still_needs_it() -> None:
    assert accepts({"type": "string", "pattern": r"^b[^\\]$"}, r'"b\\"'), "no need to mend it more"


def test_patterns_are_found_where_schemas_have_them() -> None:
    mended = mend_pattern("[^a]")
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "[^a]"}},
        "patternProperties": {"[^a]": {"items": [{"pattern": "[^a]"}]}},
        "enum": [{"pattern": "[^a]"}],
    }
    found = mend_patterns(schema)
    assert found == {
        "properties": {"pattern": {"type": "string", "pattern": mended}},
        "patternProperties": {mended: {"items": [{"pattern": mended}]}},
        "enum": [{"pattern": "[^a]"}],
    }
    assert mend_patterns(found) == found
