"""The grammar of Gemma 4's calls: what it accepts fits the schema, and what fits it accepts."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import grammar_from

from tests.unit.grammar.canvases import EOS, answer, rows_of
from tests.unit.grammar.special_tokens import decode, encode, grammars
from tests.unit.grammar.test_reasoning import meant
from tests.unit.requests.test_gemma_reader import TEXT, call
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.completion import find_shortest_completion
from vllm_dllm.grammar.gemma_calls import calls_rule
from vllm_dllm.grammar.lark import LarkRules
from vllm_dllm.grammar.schema_forms import SchemaError
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.requests.gemma_reader import read_calls
from vllm_dllm.requests.structural_tag import structural_tag_to_lark


def start(functions: dict[str, Any], **options: bool) -> GrammarState:
    lark = LarkRules()
    asked = {"at_least_one": True, "stop_after_first": True, **options}
    rule = lark.add_rule(calls_rule(lark, functions, **asked))
    return grammars().start_state(grammar_from("grammar", lark.to_text(rule)), frozenset())


def accepts(state: GrammarState, text: str) -> bool:
    state, tokens = state.copy(), encode(text)
    return state.consume_tokens(tokens) == len(tokens) and state.is_complete()


def of(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def of_noise(state: GrammarState, seed: int, spare: int = 30) -> str:
    """An answer that fits into few tokens more than it needs."""
    needed = find_shortest_completion(state, 400)
    assert needed is not None
    most = len(needed) + spare
    return decode(answer(state, np.random.default_rng(seed), 32, most, scale=3.0))


NODE = {"$ref": "#/$defs/node"}
TREE = {
    "$defs": {
        "node": of({"name": {"type": "string"}, "next": {"anyOf": [NODE, {"type": "null"}]}})
    },
    "$ref": "#/$defs/node",
}
SHAPES = {
    "oneOf": [
        of({"kind": {"const": "circle"}, "r": {"type": "number"}}, "kind", "r"),
        of({"kind": {"const": "square"}, "a": {"type": "number"}}, "kind", "a"),
    ]
}
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "text": (of({"a": {"type": "string"}}, "a"), [{"a": ""}, {"a": 'x"}, é\n'}], [{}, {"a": 1}]),
    "numbers": (
        of({"i": {"type": "integer", "minimum": 3}, "x": {"type": "number"}}, "i"),
        [{"i": 3}, {"i": 40, "x": -1.5}],
        [{"i": 2}, {"i": 3.5}, {"x": 1.0}],
    ),
    "boolean and null": (
        of({"a": {"type": ["boolean", "null"]}}, "a"),
        [{"a": True}, {"a": None}],
        [{"a": 0}, {"a": "true"}],
    ),
    "enum": (
        of({"a": {"enum": ["red", 1, None, [1, "x"], {"k": "v"}]}}, "a"),
        [{"a": "red"}, {"a": 1}, {"a": None}, {"a": [1, "x"]}, {"a": {"k": "v"}}],
        [{"a": "1"}, {"a": "blue"}],
    ),
    "enum of a type": (of({"a": {"type": "string", "enum": ["x", 1]}}), [{"a": "x"}], [{"a": 1}]),
    "optional keys": (
        of({"b": {"type": "integer"}, "a": {"type": "integer"}, "C": {"type": "integer"}}, "b"),
        [{"b": 1}, {"a": 1, "b": 2}, {"b": 1, "C": 3}, {"a": 1, "b": 2, "C": 3}],
        [{"a": 1}, {"b": 1, "d": 2}],
    ),
    "all optional": (
        of({"a": {"type": "integer"}, "b": {"type": "integer"}}),
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"c": 1}],
    ),
    "nested": (
        of({"o": of({"p": {"type": "string"}}, "p")}, "o"),
        [{"o": {"p": "x"}}],
        [{"o": {}}, {"o": "x"}],
    ),
    "list": (
        of({"l": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}}),
        [{"l": [1]}, {"l": [1, 2, 3]}],
        [{"l": []}, {"l": [1, 2, 3, 4]}, {"l": ["1"]}],
    ),
    "list of any length": (
        of({"l": {"type": "array", "items": {"type": "string"}}}),
        [{"l": []}, {"l": ["a"]}, {"l": ["a", "b"]}],
        [{"l": [1]}],
    ),
    "tuple": (
        of({"l": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}}),
        [{"l": ["a", 1]}],
        [{"l": [1, "a"]}],
    ),
    "a map": (
        of({"m": {"type": "object", "additionalProperties": {"type": "integer"}}}, "m"),
        [{"m": {}}, {"m": {"x": 1, "y": 2}}],
        [{"m": {"x": "1"}}],
    ),
    "anything": (
        of({"a": {}}, "a"),
        [{"a": 1}, {"a": "x"}, {"a": [None, {"b": True}]}],
        [{}],
    ),
    "one of two": (
        of({"a": {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}}, "a"),
        [{"a": 1}, {"a": "xy"}],
        [{"a": "x"}, {"a": True}],
    ),
    "shapes": (
        of({"s": SHAPES}, "s"),
        [{"s": {"kind": "circle", "r": 1}}],
        [{"s": {"kind": "square", "r": 1}}],
    ),
    "a list in itself": (TREE, [{}, {"name": "a", "next": {"next": None}}], [{"next": 1}]),
    "pattern": (
        of(
            {
                "a": {"type": "string", "pattern": "^[a-z]+$"},
                "b": {"type": "string", "pattern": "q"},
            }
        ),
        [{"a": "xy"}, {"b": "aqb"}],
        [{"a": "x1"}, {"b": "ab"}],
    ),
    "length": (
        of({"a": {"type": "string", "minLength": 2, "maxLength": 3}}),
        [{"a": "éa"}, {"a": "abc"}],
        [{"a": "a"}, {"a": "abcd"}],
    ),
    "date": (
        of({"d": {"type": "string", "format": "date"}}),
        [{"d": "2026-11-30"}, {"d": "2028-02-29"}, {"d": "2027-01-31"}],
        [{"d": "x"}, {"d": "2026-11-31"}, {"d": "2027-02-29"}, {"d": "2026-1-1"}],
    ),
    "time": (
        of({"d": {"type": "string", "format": "date-time"}}),
        [{"d": "2026-11-30T23:59:00Z"}, {"d": "2026-11-30T00:00:00.5+01:00"}],
        [{"d": "2026-11-30"}, {"d": "2026-11-30T24:00:00Z"}],
    ),
    "signs": (of({"a": {"enum": ['"\\ /\n', "π 🙂"]}}), [{"a": '"\\ /\n'}, {"a": "π 🙂"}], []),
    "all of": (
        of({"a": {"allOf": [{"type": ["number", "null"]}, {"type": "integer", "minimum": 5}]}}),
        [{"a": 5}],
        [{"a": 4}, {"a": 5.5}, {"a": None}],
    ),
    "notes": (
        of({"a": {"type": "integer", "title": "A", "description": "a number", "default": 3}}),
        [{"a": 1}],
        [{"a": "1"}],
    ),
    "no arguments": (of({}, additionalProperties=False), [{}], [{"a": 1}]),
    "an odd name": (of({"a b": {"type": "integer"}}, "a b"), [], [{"a b": 1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_grammar_is_the_schema(name: str) -> None:
    schema, right, wrong = CASES[name]
    state = start({"f": schema})
    for arguments in right:
        jsonschema.validate(arguments, schema)
        assert accepts(state, call("f", arguments)), arguments
    for arguments in wrong:
        assert not accepts(state, call("f", arguments)), arguments


@pytest.mark.parametrize("name", CASES)
def test_noise_becomes_a_call_that_fits(name: str) -> None:
    schema = CASES[name][0]
    for seed in range(3):
        text = of_noise(start({"f": schema}), seed)
        around, calls = read_calls(text)
        assert around == "" and [one.name for one in calls] == ["f"], text
        jsonschema.validate(json.loads(calls[0].arguments), schema)


@given(TEXT)
@settings(deadline=None, max_examples=50)
def test_every_text_can_be_said(text: str) -> None:
    state = start({"f": of({"a": {"type": "string"}}, "a")})
    assert accepts(state, call("f", {"a": text}))


def test_a_text_cannot_end_early() -> None:
    """The name of the token that ends it, spelt with others, would be read as that token."""
    state = start({"f": of({"a": {"type": "string"}}, "a")})
    assert state.consume_tokens(encode('<|tool_call>call:f{a:<|"|>')) > 0
    spelt = [encode(sign)[0] for sign in '<|"|>']
    assert state.consume_tokens(spelt) == len(spelt) - 1


CALL = call("f", {"a": 1})
OTHER = call("g", {})
FUNCTIONS = {"f": of({"a": {"type": "integer"}}, "a"), "g": of({}, additionalProperties=False)}
CHOICES: dict[str, tuple[dict[str, bool], list[str], list[str]]] = {
    "auto": (
        {"at_least_one": False, "stop_after_first": False},
        ["", "a text < {", CALL, f"First: {CALL}{OTHER}"],
        [f"{CALL} and", "<|tool_call>", call("h", {})],
    ),
    "auto, one": (
        {"at_least_one": False, "stop_after_first": True},
        ["", f"so {OTHER}"],
        [CALL + OTHER],
    ),
    "required": (
        {"at_least_one": True, "stop_after_first": False},
        [CALL, CALL + CALL + OTHER],
        ["", "text", f"a{CALL}"],
    ),
    "required, one": ({"at_least_one": True, "stop_after_first": True}, [OTHER], [CALL + CALL]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    options, right, wrong = CHOICES[name]
    state = start(FUNCTIONS, **options)
    assert all(accepts(state, text) for text in right)
    assert not any(accepts(state, text) for text in wrong)


REFUSED: dict[str, tuple[Any, str]] = {
    "not": (of({"a": {"not": {}}}), r"function 'f': #/properties/a/not is not supported"),
    "unique": (of({"a": {"uniqueItems": True}}), "#/properties/a/uniqueItems is not supported"),
    "pattern of keys": (of({}, patternProperties={"^x": {}}), "#/patternProperties is not"),
    "unknown type": (of({"a": {"type": "strin"}}), "#/properties/a/type must be .* got 'strin'"),
    "no schema": (of({"a": 3}), "#/properties/a must be a JSON schema, got 3"),
    "no object": ({"type": "string"}, "# must be the schema of an object"),
    "reference to nowhere": (of({"a": {"$ref": "#/$defs/x"}}), "leads nowhere, got '#/.defs/x'"),
    "reference elsewhere": (of({"a": {"$ref": "http://x"}}), "must begin with '#'"),
    "reference to itself": ({"$ref": "#"}, "refers to itself"),
    "never": (of({"a": False}, "a"), "#/properties/a allows no value"),
    "no value": (of({"a": {"enum": []}}), "#/properties/a allows no value"),
    "both of one": (
        of({"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}),
        "#/properties/a/oneOf must have alternatives that differ",
    ),
    "required, but not there": (of({}, "x", additionalProperties=False), "names 'x'"),
    "lengths": (of({"a": {"type": "string", "minLength": 3, "maxLength": 2}}), "maxLength must"),
    "few items": (of({"a": {"type": "array", "minItems": 3, "maxItems": 2}}), "minItems must be"),
    "alternatives": (of({"a": {"type": "string", "pattern": "^a|b$"}}), "in parentheses"),
    "no properties": ({"type": "object", "properties": []}, "#/properties must be an object, got"),
    "no number": (of({"a": {"minLength": "1"}}), "#/properties/a/minLength must be a whole number"),
    "too many forms": (
        of({"a": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}] * 12}}),
        "#/properties/a must have at most 1000 forms",
    ),
    "delimiter": (of({"a": {"const": 'x<|"|>'}}), "with <|"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str) -> None:
    schema, complaint = REFUSED[name]
    with pytest.raises(SchemaError, match=complaint.replace("|", r"\|")) as refusal:
        start({"f": schema})
    assert "\n" not in str(refusal.value)


def test_no_function() -> None:
    with pytest.raises(SchemaError, match="must not be empty"):
        start({})
    with pytest.raises(SchemaError, match="its name must be"):
        start({"f{": {}})


WEATHER = {"weather": of({"city": {"type": "string"}, "days": {"type": "integer"}}, "city", "days")}
MEANT = call("weather", {"city": "Rome, the old one", "days": 31})


def cut(state: GrammarState, text: str, most: int) -> tuple[str, bool]:
    """What there is of an answer that the model means, within so many tokens; and whether it was
    closed."""
    rows = rows_of(meant(text, 48))
    found = constrain_canvas(state, rows, most, EOS)
    return decode([token for token in found.path.tokens if token != EOS]), found.is_cut


OPTIONAL = {
    "auto": start(WEATHER, at_least_one=False, stop_after_first=False),
    "or a form": grammars().start_state(
        grammar_from(
            "grammar",
            structural_tag_to_lark(
                {
                    "format": {
                        "type": "or",
                        "elements": [
                            {
                                "type": "gemma4_calls",
                                "functions": [
                                    {"name": name, "parameters": schema}
                                    for name, schema in WEATHER.items()
                                ],
                                "at_least_one": True,
                            },
                            {"type": "json_schema", "json_schema": {"type": "object"}},
                        ],
                    }
                }
            ),
        ),
        frozenset(),
    ),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_call_that_need_not_come_is_not_finished_for_the_model(name: str) -> None:
    whole = decode(encode(MEANT))
    for most in range(1, len(encode(MEANT)) + 1):
        text, is_cut = cut(OPTIONAL[name], MEANT, most)
        assert whole.startswith(text) and text == decode(encode(MEANT)[:most]) and not is_cut
        assert bool(read_calls(text)[1]) == (most >= len(encode(MEANT)) - 1)


def test_a_second_call_is_not_either() -> None:
    state = start(WEATHER, stop_after_first=False)
    both = MEANT + MEANT
    for most in range(len(encode(MEANT)), 48):
        text, is_cut = cut(state, both, most)
        assert both.startswith(text) and not is_cut


def test_one_that_must_come_is_closed() -> None:
    state = start(WEATHER)
    needed = find_shortest_completion(state, 100)
    assert needed is not None
    for most in range(len(needed), len(encode(MEANT))):
        text, is_cut = cut(state, MEANT, most)
        assert is_cut and [one.name for one in read_calls(text)[1]] == ["weather"]


def test_another_form_is_closed_beside_calls() -> None:
    text, is_cut = cut(OPTIONAL["or a form"], '{"a": "rather a long text"}', 8)
    assert is_cut and isinstance(json.loads(text), dict)
