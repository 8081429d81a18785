"""What `gemma4_strict` asks the engine for, and how it reads the answer."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from tests.paths import CHECKPOINTS
from vllm_dllm.requests.gemma_tool_parser import GemmaToolParser
from vllm_dllm.requests.structural_tag import structural_tag_to_lark

SHIPPED = CHECKPOINTS / "diffusiongemma-tiny"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


def chat(**options: Any) -> ChatCompletionRequest:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "tools": TOOLS}
    return ChatCompletionRequest(**{**asked, **options})


def adjusted(tokenizer: Any, request: Any) -> dict[str, Any] | None:
    """The format that is asked for."""
    found = GemmaToolParser(tokenizer, request.tools).adjust_request(request)
    if found.structured_outputs is None:
        return None
    assert not found.skip_special_tokens
    tag = json.loads(found.structured_outputs.structural_tag)
    assert "<|tool_call>" in structural_tag_to_lark(tag)
    return tag["format"]


NAMED = {"type": "function", "function": {"name": "g"}}
CHOICES: dict[str, tuple[dict[str, Any], list[str], bool, bool]] = {
    "auto": ({"tool_choice": "auto"}, ["f", "g"], False, False),
    "nothing said": ({}, ["f", "g"], False, False),
    "required": ({"tool_choice": "required"}, ["f", "g"], True, False),
    "required, one": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        ["f", "g"],
        True,
        True,
    ),
    "named": ({"tool_choice": NAMED}, ["g"], True, True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_asked_for(tokenizer: Any, name: str) -> None:
    options, names, must_come, is_single = CHOICES[name]
    form = adjusted(tokenizer, chat(**options))
    assert form is not None and form["type"] == "gemma4_calls"
    assert [one["name"] for one in form["functions"]] == names
    assert (form["at_least_one"], form["stop_after_first"]) == (must_come, is_single)


def test_responses(tokenizer: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    choice = {"type": "function", "name": "f"}
    form = adjusted(tokenizer, ResponsesRequest(input="Hi", tools=tools, tool_choice=choice))
    assert form is not None and form["functions"] == [{"name": "f", "parameters": SCHEMA}]
    assert form["at_least_one"]


def test_a_form_beside_calls(tokenizer: Any) -> None:
    """An answer is one or the other; where a call must come, it is that."""
    json_object = {"type": "json_object"}
    form = adjusted(tokenizer, chat(response_format=json_object, tool_choice="auto"))
    assert form is not None and form["type"] == "or"
    assert [one["type"] for one in form["elements"]] == ["gemma4_calls", "json_schema"]
    assert form["elements"][0]["at_least_one"]
    grammar = {"grammar": 'start: "a"'}
    form = adjusted(tokenizer, chat(structured_outputs=grammar, tool_choice="auto"))
    assert form is not None and form["elements"][1] == {"type": "grammar", **grammar}
    form = adjusted(tokenizer, chat(response_format=json_object, tool_choice="required"))
    assert form is not None and form["type"] == "gemma4_calls"


def test_nothing_is_asked_for_without_tools(tokenizer: Any) -> None:
    assert adjusted(tokenizer, chat(tools=None)) is None
    assert adjusted(tokenizer, chat(tool_choice="none")) is None


def test_a_function_that_is_not_there(tokenizer: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    allowed = [{"type": "function", "name": name} for name in ("f", "h")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    request = ResponsesRequest(input="Hi", tools=tools, tool_choice=choice)
    with pytest.raises(VLLMValidationError, match=r"must name one of the tools \['f'\], got 'h'"):
        adjusted(tokenizer, request)


def test_a_tokenizer_without_the_tokens() -> None:
    with pytest.raises(RuntimeError, match="needs a tokenizer with the tokens"):
        GemmaToolParser(AutoTokenizer.from_pretrained(SHIPPED))
