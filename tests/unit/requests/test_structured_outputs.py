"""Structured outputs are admitted if there is an answer of that form, and it fits; structural tags
of xgrammar's form are grammars."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
from llguidance import grammar_from
from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import ENDLESS, SCHEMAS, THOUGHT_ENDS, start, tokenizer
from vllm_dllm.grammar.patterns import mend_patterns
from vllm_dllm.requests import structured_outputs
from vllm_dllm.requests.structural_tag import structural_tag_to_lark
from vllm_dllm.requests.structured_outputs import check_structured_outputs

MAX_MODEL_LEN = 512


def check(
    tokenizer: Any,
    wanted: StructuredOutputsParams,
    config: StructuredOutputsConfig | None = None,
    **options: Any,
) -> SamplingParams:
    params = SamplingParams(**{"max_tokens": 100, **options}, structured_outputs=wanted)
    config = config or StructuredOutputsConfig()
    if params.bad_words:
        params.update_from_tokenizer(tokenizer)
    is_constrained = params.logprob_token_ids is not None
    check_structured_outputs(
        params, config, tokenizer, 512, MAX_MODEL_LEN, is_constrained=is_constrained
    )
    return params


def of(**wanted: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**wanted)


PERSON = of(json=SCHEMAS["person"])
DATES = {"d": {"type": "string", "format": "date", "pattern": "^20"}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": DATES}}
CALLS = {"format": {"type": "gemma4_calls", "functions": [FUNCTION]}}
TAG = {"structures": [{"begin": "<c>", "schema": {}, "end": "</c>"}], "triggers": ["<c>"]}


@pytest.mark.parametrize(
    "wanted",
    [
        PERSON,
        of(json=json.dumps(SCHEMAS["tree"])),
        of(json_object=True),
        of(regex="[a-z]+"),
        of(choice=["a", "b"]),
        of(grammar='start: "a"'),
        of(grammar='root ::= "a"'),
        of(structural_tag=json.dumps(TAG)),
        of(structural_tag=json.dumps(CALLS)),
    ],
    ids=[
        *("json", "json text", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"),
        "calls",
    ],
)
def test_admitted(tokenizer: Any, wanted: StructuredOutputsParams) -> None:
    check(tokenizer, wanted)


def test_a_structural_tag_becomes_a_grammar(tokenizer: Any) -> None:
    """All that follows, vLLM's own check of the blocks too, reads the same grammar."""
    found = check(tokenizer, of(structural_tag=json.dumps(TAG))).structured_outputs
    assert found is not None and found.structural_tag is None
    assert found.grammar is not None and "<c>" in found.grammar


REFUSED: dict[str, tuple[StructuredOutputsParams, str]] = {
    "unsupported keyword": (
        of(json={"properties": {"tags": {"type": "array", "uniqueItems": True}}}),
        r'structured_outputs.json cannot be used: .*"uniqueItems".*#/properties/tags/uniqueItems',
    ),
    "unknown type": (of(json={"items": {"type": "strin"}}), r"Invalid type: strin .*#/items/type"),
    "no JSON": (of(json="{"), "structured_outputs.json cannot be used: Expecting"),
    "no object": (of(json_object=False), "json_object must be true"),
    "endless reference": (of(json=ENDLESS), "no answer of at most 512 tokens was found"),
    "endless rule": (of(grammar='start: "a" start'), "no answer of at most 512 tokens"),
    "regex": (of(regex="["), "structured_outputs.regex cannot be used: .*regex"),
    "megabyte": (of(regex="a" * 1_000_000), "at most 16384 bytes, got 1000000"),
    "bytes, not characters": (of(regex="é" * 10_000), "at most 16384 bytes, got 20000"),
    "megabyte of choices": (
        of(choice=[f"x{i}" for i in range(90_000)]),
        "structured_outputs.choice cannot be used: it must be at most 65536 bytes",
    ),
    "too many properties": (
        of(json={"properties": {f"p{i}": {} for i in range(4000)}}),
        "#/properties must have at most 300 entries, got 4000",
    ),
    "an hour to compile": (
        of(json={"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(40)]}),
        "structured_outputs.json cannot be used: # must not join more than 16 patterns",
    ),
    "an hour to compile, as a grammar": (
        of(grammar="start: T\nT: " + " & ".join(f"/(.*)x{i}/" for i in range(40))),
        "structured_outputs.grammar cannot be used: it must have at most 16 signs &",
    ),
    "no choice": (of(choice=[]), "structured_outputs.choice cannot be used"),
    "empty grammar": (of(grammar=" "), "structured_outputs.grammar cannot be used"),
    "tag without triggers": (
        of(structural_tag=json.dumps({"structures": TAG["structures"]})),
        "structured_outputs.structural_tag lacks the key 'triggers'",
    ),
    "tag of a list": (of(structural_tag="[1]"), "structured_outputs.structural_tag cannot be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tokenizer: Any, name: str) -> None:
    wanted, message = REFUSED[name]
    with pytest.raises(VLLMValidationError, match=message) as refusal:
        check(tokenizer, wanted)
    assert "\n" not in str(refusal.value)


def test_patterns_are_mended(tokenizer: Any) -> None:
    """And nothing else of a request is changed, nor a schema without any."""
    schema = {"type": "string", "pattern": r"^[^\\]+$"}
    wanted = of(json=json.dumps(schema), disable_additional_properties=True)
    found = check(tokenizer, wanted).structured_outputs
    assert found is not None and isinstance(found.json, str)
    assert json.loads(found.json) == mend_patterns(schema) != schema
    assert found.disable_additional_properties
    person = of(json=json.dumps(PERSON.json))
    assert check(tokenizer, person).structured_outputs is person


def test_integers_of_a_schema_may_be_of_any_size(tokenizer: Any) -> None:
    """The engine is sent the parameters, in messages whose integers have 64 bits."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
    params = check(tokenizer, of(json=schema))
    assert b"1" + b"0" * 30 in bytes(MsgpackEncoder().encode(params)[0])


def test_what_no_search_finds_is_admitted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have an answer: then its end is that of its tokens, as without a search."""
    check(tokenizer, of(grammar='start: "a" start | "b" start | /[c-z]/ start'), max_tokens=1)
    monkeypatch.setattr(structured_outputs, "find_shortest_completion", lambda *args: None)
    check(tokenizer, of(regex="[a-z]+ [0-9]+"), max_tokens=1)


TOO_FEW = r"max_tokens must be at least 8 .* got 7"
WITHOUT_EXCLUDED = "without the tokens that the request excludes"


@pytest.mark.parametrize(
    ("wanted", "options", "complaint"),
    [
        (PERSON, {"max_tokens": 8}, None),
        (PERSON, {"max_tokens": None}, None),
        (PERSON, {"max_tokens": 7}, TOO_FEW),
        (PERSON, {"min_tokens": 8, "max_tokens": 8}, None),
        (PERSON, {"min_tokens": 7, "max_tokens": 7}, TOO_FEW),
        # An answer that can be longer must be; one that cannot needs no more tokens than it has.
        (of(regex="[a-z]+"), {"min_tokens": 20, "max_tokens": 20}, None),
        (of(choice=["a", "b"]), {"min_tokens": 2, "max_tokens": 2}, None),
        (
            of(regex="a([0-9]{9})?"),
            {"min_tokens": 3, "max_tokens": 5},
            "must be at least 10 .* got 5",
        ),
        (PERSON, {"allowed_token_ids": [*range(1, 512)]}, None),
        (PERSON, {"allowed_token_ids": [*range(2, 512)]}, "every token that ends an answer, such"),
        (PERSON, {"allowed_token_ids": [1, 100, 101]}, WITHOUT_EXCLUDED),
        (PERSON, {"logprobs": 2, "logprob_token_ids": [1, 100]}, WITHOUT_EXCLUDED),
    ],
)
def test_the_tokens_that_an_answer_has(
    tokenizer: Any, wanted: StructuredOutputsParams, options: Any, complaint: str | None
) -> None:
    with pytest.raises(VLLMValidationError, match=complaint) if complaint else nullcontext():
        check(tokenizer, wanted, **options)


def test_reasoning_takes_a_token_at_least(tokenizer: Any) -> None:
    for parser in ("gemma4", "deepseek_r1"):
        config = StructuredOutputsConfig(reasoning_parser=parser)
        check(tokenizer, PERSON, config, max_tokens=9)
        with pytest.raises(VLLMValidationError, match=r"at least 9 .* end of reasoning, got 8"):
            check(tokenizer, PERSON, config, max_tokens=8)
    with pytest.raises(VLLMValidationError, match=WITHOUT_EXCLUDED):
        check(tokenizer, PERSON, config, allowed_token_ids=list(range(1, THOUGHT_ENDS)))


WITHOUT_CHANNELS = "needs a tokenizer with the tokens|one token.*--reasoning-parser gemma4"


def test_other_settings(tokenizer: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"need the backend 'guidance'.*'xgrammar'"):
        check(tokenizer, PERSON, StructuredOutputsConfig(backend="xgrammar"))
    thinking = StructuredOutputsConfig(reasoning_parser="gemma4")
    # Where the extension's parser has taken the name, a server would not have started.
    plain = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny")
    with pytest.raises((VLLMValidationError, RuntimeError), match=WITHOUT_CHANNELS):
        check(plain, PERSON, thinking)
    everywhere = StructuredOutputsConfig(reasoning_parser="gemma4", enable_in_reasoning=True)
    check(plain, PERSON, everywhere)
    with pytest.raises(VLLMValidationError, match="need a tokenizer"):
        check(None, PERSON)


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
