"""Gemma 4's calls are read as they were meant, also while they are still coming."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.grammar.special_tokens import IDS
from vllm_dllm.grammar.gemma_calls import QUOTE
from vllm_dllm.grammar.gemma_reading import MalformedError, overlap, read_calls

# Without what would be read as a token, or as the beginning of one.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: not any(name in text for name in IDS) and not overlap(text, QUOTE)
)
KEY = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(KEY, VALUE, max_size=4)


def written(value: Any) -> str:
    """As Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return "{" + ",".join(f"{key}:{written(one)}" for key, one in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


@given(st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(deadline=None)
def test_what_the_template_writes_is_read(found: list[dict[str, Any]]) -> None:
    text = "Well. " + "".join(call(f"f{i}", one) for i, one in enumerate(found))
    around, calls = read_calls(text)
    assert around == "Well. " and [one.name for one in calls] == [
        f"f{i}" for i in range(len(found))
    ]
    assert [json.loads(one.arguments) for one in calls] == found
    assert all(one.is_complete for one in calls)


@given(ARGUMENTS, ARGUMENTS)
@settings(deadline=None, max_examples=50)
def test_a_cut_call_is_the_beginning_of_the_whole_one(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    text = call("first", first) + call("second", second)
    whole = read_calls(text)[1]
    for end in range(len(text)):
        for part, one in zip(read_calls(text[:end])[1], whole, strict=False):
            assert one.name == part.name and one.arguments.startswith(part.arguments)


CASES = {
    "spaces": ("{ a : 1 , b:[ 1, 2 ] }", {"a": 1, "b": [1, 2]}),
    "a bare word": ("{a:red}", {"a": "red"}),
    "a key in quotes": (f"{{{QUOTE}a:b{QUOTE}:1}}", {"a:b": 1}),
    "signs in a text": (f'{{a:{QUOTE}}},]"\\ <|tool_call>{QUOTE}}}', {"a": '},]"\\ <|tool_call>'}),
    "nothing": ("{}", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_models_write_it(name: str) -> None:
    text, expected = CASES[name]
    ((one,)) = read_calls(f"<|tool_call>call:f{text}<tool_call|>")[1]
    assert json.loads(one.arguments) == expected


@pytest.mark.parametrize("text", ["f{}", "call:f{a:1 b:2}x", "call:f{}!", "call:f{a:[1}"])
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(MalformedError, match="expected"):
        read_calls(f"<|tool_call>{text}<tool_call|>")
