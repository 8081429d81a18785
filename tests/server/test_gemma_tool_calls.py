"""Calls in Gemma 4's syntax, as OpenAI's clients ask for them, of a model of random weights: that
it calls at all, and rightly, is the grammar's doing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError

from bench.calls import calls_of, streamed_calls
from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.server.conftest import UNCOMPILED, Server, serving
from tests.unit.grammar.canvases import add_tokens

PARSERS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "gemma4_strict"),
    *("--reasoning-parser", "gemma4", "--served-model-name", "gemma"),
)
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city", "days"],
    },
    "remind": {
        "type": "object",
        "properties": {
            "when": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
            "loud": {"type": "boolean"},
            "of": {
                "type": "object",
                "properties": {"what": {"type": "string", "maxLength": 8}},
                "required": ["what"],
                "additionalProperties": False,
            },
        },
        "required": ["when", "of"],
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in SCHEMAS.items()
]
QUESTION = "Sort: q d x a"
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("gemma"), canvas_length=64)
    folder = tmp_path_factory.mktemp("calling")
    with serving(add_tokens(Path(checkpoint)), folder, *UNCOMPILED, *PARSERS) as it:
        yield it


def ask(server: Server, **options: Any) -> Any:
    extra = {"vllm_xargs": {"diffusion_max_steps": 3}, **options.pop("extra_body", {})}
    asked = {"model": "gemma", "max_tokens": 150, "tools": TOOLS, "seed": 1}
    return server.chat(QUESTION, **{**asked, **options, "extra_body": extra})


def check(calls: list[Any]) -> list[str]:
    """That each fits its function; their names."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("seed", range(4))
def test_some_call_must_come(calling: Server, seed: int) -> None:
    answer = ask(calling, tool_choice="required", seed=seed).choices[0]
    assert check(answer.message.tool_calls) and not answer.message.content
    assert answer.finish_reason in ("tool_calls", "length")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_one_must_come(calling: Server, name: str) -> None:
    answer = ask(calling, tool_choice=named(name)).choices[0].message
    assert check(answer.tool_calls) == [name]


@pytest.mark.parametrize("thinking", [False, True], ids=["at once", "thinking"])
def test_streamed_is_the_same(calling: Server, thinking: bool) -> None:
    asked = {"tool_choice": "required", "extra_body": THINKING if thinking else {}}
    whole = ask(calling, **asked).choices[0].message
    check(whole.tool_calls)
    chunks = list(ask(calling, stream=True, **asked))
    assert streamed_calls(chunks) == calls_of(whole)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert reasoning == (getattr(whole, "reasoning", None) or "") and (thinking or not reasoning)
    assert "".join(delta.content or "" for delta in deltas) == (whole.content or "")


@pytest.mark.parametrize("seed", range(3))
def test_json_behind_reasoning(calling: Server, seed: int) -> None:
    schema = SCHEMAS["remind"]["properties"]["of"]
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    for extra in (THINKING, {}):
        asked = {"response_format": form, "extra_body": extra, "seed": seed}
        answer = ask(calling, tools=None, **asked).choices[0].message
        jsonschema.validate(json.loads(answer.content), schema)
        assert extra or not getattr(answer, "reasoning", None)


def test_responses(calling: Server) -> None:
    tools = [{"type": "function", "name": n, "parameters": p} for n, p in SCHEMAS.items()]
    answer = calling.client.responses.create(
        model="gemma",
        input=QUESTION,
        tools=tools,
        tool_choice="required",
        max_output_tokens=150,
        extra_body={"seed": 1},
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_a_schema_that_cannot_be_held(calling: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(BadRequestError, match="function 'f': #/properties/a/not is not supported"):
        ask(calling, tools=[tool], tool_choice="auto")
