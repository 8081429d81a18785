"""The grammar of Gemma 4's calls: what it accepts fits the schema, and what fits it accepts."""

import functools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import grammar_from

from tests.gemma_answers import read_whole_answer
from tests.unit.grammar.canvases import answer, decode, encode, grammars
from tests.unit.grammar.test_reasoning import found_for
from tests.unit.requests.test_gemma_tool_parser import TEXT, call
from vllm_dllm.grammar.completion import find_shortest_completion
from vllm_dllm.grammar.gemma_calls import LarkRules, calls_rule
from vllm_dllm.grammar.schema_keys import SchemaError
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.requests.structural_tag import structural_tag_to_lark


def start(functions: dict[str, Any], **options: bool) -> GrammarState:
    lark = LarkRules()
    asked = {"at_least_one": True, "stop_after_first": True, **options}
    rule = lark.add_rule(calls_rule(lark, functions, **asked))
    return start_lark(lark.to_text(rule))


def start_lark(text: str) -> GrammarState:
    return grammars().start_state(grammar_from("grammar", text), frozenset())


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
VALUES: list[Any] = [
    *("", "x", "é", "red", "xy", "éa", "abc", "x1", "aqb", "abcd", "true", "1", 'x"}, é\n'),
    *(0, 1, 2, 3, 4, 5, 40, -1.5, 3.5, 5.5, True, False, None),
    *([], [1], ["1"], ["a"], ["a", "b"], ["a", 1], [1, "a"], [1, "x"], [1, 2, 3], [1, 2, 3, 4]),
    *({}, {"k": "v"}, {"x": 1, "y": 2}, {"x": "1"}, {"p": "x"}, [None, {"b": True}]),
    *({"kind": "circle", "r": 1}, {"kind": "square", "r": 1}, {"kind": "square", "a": -1.5}),
]
# Of one argument: jsonschema says which of the values fit.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer", "minimum": 3},
    "number": {"type": "number"},
    "boolean and null": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", 1, None, [1, "x"], {"k": "v"}]},
    "enum of a type": {"type": "string", "enum": ["x", 1]},
    "nested": of({"p": {"type": "string"}}, "p", additionalProperties=False),
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "list of any length": {"type": "array", "items": {"type": "string"}},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "minItems": 2,
    },
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "anything": {},
    "one of two": {"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]},
    "shapes": SHAPES,
    "one of two types": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "one of two words": {"oneOf": [{"enum": ["x", "xy"]}, {"const": "red"}, {"type": "null"}]},
    "one of one": functools.reduce(lambda one, _: {"oneOf": [one]}, range(40), {"const": 1}),
    "all of two objects": {"allOf": [of({"x": {"type": "integer"}}, "x"), of({"y": {}}, "y")]},
    "true and an integer": {"allOf": [True, {"type": "integer"}]},
    "false or null": {"type": ["boolean", "null"], "enum": [False, None, 1]},
    "any one item": {"type": "array", "items": False, "prefixItems": [True], "minItems": 1},
    "no items": {"type": "array", "maxItems": 0},
    "more than the tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}],
        "items": {"type": "integer"},
        "minItems": 3,
        "maxItems": 3,
    },
    "a map of one": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": 1,
    },
    "an empty map": {"type": "object", "maxProperties": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]+$"},
    "pattern somewhere": {"type": "string", "pattern": "q"},
    "length": {"type": "string", "minLength": 2, "maxLength": 3},
    "all of": {"allOf": [{"type": ["number", "null"]}, {"type": "integer", "minimum": 5}]},
    "notes": {"type": "integer", "title": "A", "description": "a number", "default": 3},
}
# Of all arguments, with some that fit and some that do not.
OBJECTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
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
    "a list in itself": (TREE, [{}, {"name": "a", "next": {"next": None}}], [{"next": 1}]),
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
    "no arguments": (of({}, additionalProperties=False), [{}], [{"a": 1}]),
    "an odd name": (of({"a b": {"type": "integer"}}, "a b"), [], [{"a b": 1}]),
}
FUNCTION_SCHEMAS = {
    **{name: of({"a": schema}, "a") for name, schema in ARGUMENTS.items()},
    **{name: schema for name, (schema, _, _) in OBJECTS.items()},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_what_its_schema_says(name: str) -> None:
    state = start({"f": FUNCTION_SCHEMAS[name]})
    schema = jsonschema.Draft202012Validator(ARGUMENTS[name])
    fitting = [value for value in VALUES if schema.is_valid(value)]
    assert [value for value in VALUES if accepts(state, call("f", {"a": value}))] == fitting
    assert fitting and not accepts(state, call("f", {}))


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_are_what_their_schema_says(name: str) -> None:
    schema, right, wrong = OBJECTS[name]
    state = start({"f": schema})
    for arguments in right:
        jsonschema.validate(arguments, schema)
    assert [one for one in right if not accepts(state, call("f", one))] == []
    assert [one for one in wrong if accepts(state, call("f", one))] == []


@pytest.mark.parametrize("name", FUNCTION_SCHEMAS)
def test_noise_becomes_a_call_that_fits(name: str) -> None:
    schema = FUNCTION_SCHEMAS[name]
    for seed in range(3):
        text = of_noise(start({"f": schema}), seed)
        around, calls = read_whole_answer(text)
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
    "reference elsewhere": (of({"a": {"$ref": "http://x"}}), "must be '#' or begin with '#/'"),
    "reference to itself": ({"$ref": "#"}, "refers to itself"),
    "never": (of({"a": False}, "a"), "#/properties/a allows no value"),
    "no finite value": (of({"a": {"type": "integer", "enum": [1e999]}}), "a allows no value"),
    "no value": (of({"a": {"enum": []}}), "#/properties/a allows no value"),
    "both of one": (
        of({"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}),
        "#/properties/a/oneOf must have alternatives that differ",
    ),
    "one of two keys": (
        of({"a": {"oneOf": [{"minimum": 1}, {"minLength": 1}]}}),
        "#/properties/a/oneOf must have alternatives that differ",
    ),
    "enum, not one": (of({"a": {"enum": ["x"], "minLength": 1}}), "a/minLength is not .* enum"),
    "constant and enum": (
        of({"a": {"allOf": [{"const": 1}, {"enum": [2]}]}}),
        "allOf/1/enum is not supported beside const",
    ),
    "closed, and more": (
        {"additionalProperties": False, "allOf": [of({"a": {}})]},
        "#/allOf/0/properties is not supported where another schema has additionalProperties",
    ),
    "tuple, and all": (
        of({"a": {"allOf": [{"prefixItems": [{}]}, {"items": {"type": "null"}}]}}),
        "#/properties/a/allOf/1/items is not supported where another schema has prefixItems",
    ),
    "two minima": (
        of({"a": {"allOf": [{"minimum": 1}, {"minimum": 2}]}}),
        "a/allOf/1/minimum is not supported where another schema has it, too",
    ),
    "itself, among keys": (
        of({"a": {"$ref": "#", "minProperties": 0}}),
        "must not refer to itself beside other keys",
    ),
    "anchor": (of({"a": {"$ref": "#node"}}), "must be '#' or begin with '#/', got '#node'"),
    "no names": ({"type": "object", "required": [1]}, r"required must be a list of texts, got"),
    "negative": (of({"a": {"minLength": -1}}), "must be a whole number from 0 on, got -1"),
    "numbers": (of({"a": {"minimum": 3, "maximum": 2}}), "#/properties/a cannot be used: .*than"),
    "look-ahead": (
        of({"a": {"pattern": "(?=a)b"}}),
        "function 'f': #/properties/a/pattern cannot be used: look-around",
    ),
    "unevaluated": (of({}, unevaluatedProperties=True), "unevaluatedProperties must be false, got"),
    "few properties": (of({"a": {}, "b": {}}, maxProperties=1), "#/maxProperties is not supported"),
    "odd name": (of({'<|"|>': {}}), "#/properties has a name with <|"),
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
    "too many forms of one": (
        of({"a": {"oneOf": [{"anyOf": [{"const": i}] * 300} for i in range(4)]}}),
        "#/properties/a must have at most 1000 forms",
    ),
    "too many schemas": (
        {
            **{f"{i}": {"allOf": [{"$ref": f"#/{i - 1}"}] * 2} for i in range(30)},
            "-1": {},
            "$ref": "#/29",
        },
        "# must lead to at most 10000 schemas",
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
    found = found_for(text, 48, state, most)
    return decode(found.path.tokens), found.is_cut


CALLS_OR_A_FORM = {
    "type": "or",
    "elements": [
        {
            "type": "gemma4_calls",
            "functions": [{"name": "weather", "parameters": WEATHER["weather"]}],
            "at_least_one": True,
        },
        {"type": "json_schema", "json_schema": {"type": "object"}},
    ],
}
OPTIONAL = {
    "auto": start(WEATHER, at_least_one=False, stop_after_first=False),
    "or a form": start_lark(structural_tag_to_lark({"format": CALLS_OR_A_FORM})),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_call_that_need_not_come_is_not_finished_for_the_model(name: str) -> None:
    whole = decode(encode(MEANT))
    for most in range(1, len(encode(MEANT)) + 1):
        text, is_cut = cut(OPTIONAL[name], MEANT, most)
        assert whole.startswith(text) and text == decode(encode(MEANT)[:most]) and not is_cut
        assert bool(read_whole_answer(text)[1]) == (most >= len(encode(MEANT)) - 1)


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
        assert is_cut and [one.name for one in read_whole_answer(text)[1]] == ["weather"]


def test_another_form_is_closed_beside_calls() -> None:
    text, is_cut = cut(OPTIONAL["or a form"], '{"a": "rather a long text"}', 8)
    assert is_cut and isinstance(json.loads(text), dict)
