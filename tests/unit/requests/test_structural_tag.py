"""Structural tags of xgrammar's form, as grammars: what each accepts, and what it does not."""

from typing import Any

import pytest
from llguidance import grammar_from

from tests.unit.grammar.canvases import SCHEMAS, start, tokenizer
from vllm_dllm.requests.structural_tag import structural_tag_to_lark

CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "add", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMAS["person"]},
    "end": "}\n</tool_call>",
}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"name": "Uma", "age": 7}}\n</tool_call>'
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
SEPARATED = {"type": "tags_with_separator", "separator": "\n", "tags": [CALL]}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a"b'), ['a"b'], ["a", "ab"]),
    "regex": ({"type": "regex", "pattern": "[0-9]/x"}, ["3/x"], ["3x"]),
    "grammar": ({"type": "grammar", "grammar": 'start: "a" b\nb: /[0-9]+/'}, ["a12"], ["a"]),
    "grammar of xgrammar": ({"type": "grammar", "grammar": 'root ::= "a" [0-9]'}, ["a1"], ["a12"]),
    "any_text": ({"type": "any_text"}, ["", "a\nb"], []),
    "sequence": ({"type": "sequence", "elements": [const("a"), const("b")]}, ["ab"], ["a"]),
    "or": ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab"]),
    "optional": ({"type": "optional", "content": const("ab")}, ["", "ab"], ["abab"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    "star": ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
    "tag": (CALL, [CALLED], [CALLED[:-1], "a" + CALLED]),
    "tag of text": (
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "<e>"]},
        ["<t>a b</t>", "<t><e>"],
        ["<t>a", "<t>a</t>b"],
    ),
    "triggered": (TRIGGERED, ["", "text", f"a {CALLED} b {CALLED}"], ["<tool_call>text"]),
    "triggered, at least one": (
        {**TRIGGERED, "at_least_one": True},
        [CALLED, f"{CALLED} {CALLED}"],
        ["text", f"a{CALLED}"],
    ),
    "triggered, first only": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        [CALLED],
        [CALLED + CALLED, CALLED + "a"],
    ),
    "separated": (SEPARATED, ["", CALLED, f"{CALLED}\n{CALLED}"], [CALLED + CALLED]),
    "separated, at least one": ({**SEPARATED, "at_least_one": True}, [CALLED], [""]),
    "separated, first only": (
        {**SEPARATED, "stop_after_first": True},
        ["", CALLED],
        [f"{CALLED}\n{CALLED}"],
    ),
    "the older form": (
        {"structures": [{**CALL, "schema": SCHEMAS["person"]}], "triggers": ["<tool_call>"]},
        ["text", f"a {CALLED} b"],
        ["<tool_call>text"],
    ),
}


def lark_of(node: dict[str, Any]) -> str:
    is_whole = "structures" in node
    return structural_tag_to_lark(node if is_whole else {"type": "structural_tag", "format": node})


@pytest.mark.parametrize("name", CASES)
def test_formats(name: str) -> None:
    node, accepted, rejected = CASES[name]
    grammar = grammar_from("grammar", lark_of(node))

    def is_accepted(text: str) -> bool:
        state, tokens = start(grammar), tokenizer().tokenize_str(text)
        return state.consume_tokens(tokens) == len(tokens) and state.is_complete()

    assert [text for text in accepted if not is_accepted(text)] == []
    assert [text for text in rejected if is_accepted(text)] == []


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"type": "token", "token": 3}, r"format.type must be one of \[.*got 'token'"),
        (
            {"type": "sequence", "elements": [{"type": "plus", "content": {"type": "dispatch"}}]},
            r"format.elements\[0\].content.type must be",
        ),
        (
            {"type": "json_schema", "json_schema": {}, "style": "glm_xml"},
            "format.style must be 'json', got 'glm_xml'",
        ),
        ({**CALL, "begin": {"type": "token", "token": 3}}, "format.begin must be text"),
        ({**CALL, "end": 7}, "format.end must be text, or a list of texts, got 7"),
        ({**TRIGGERED, "triggers": ["<x>"]}, r"format.tags\[0\].begin must start with one of"),
        ({"structures": [], "triggers": ["<c>"]}, "structures must not be empty"),
        ({**TRIGGERED, "excludes": ["a"]}, r"format.excludes is not supported, got \['a'\]"),
    ],
)
def test_what_is_not_known_is_named(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lark_of(node)
