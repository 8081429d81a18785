"""Calls that must come, as OpenAI's clients ask for them. The shipped model was trained on none, so
only their form is right."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", city={"enum": ["Lima", "Rome"]}, days={"type": "integer"}),
    tool("remind", when={"type": "string"}, loud={"type": "boolean"}),
]
SCHEMAS = {found["function"]["name"]: found["function"]["parameters"] for found in TOOLS}
MESSAGES = [{"role": "user", "content": "Sort: q d x a"}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*UNCOMPILED, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(CHECKPOINT, tmp_path_factory.mktemp("calling"), *options) as it:
        yield it


def ask(server: Server, tool_choice: Any, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=tool_choice,
        **{"max_tokens": 120, **options},
    )


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(4))
def test_some_call_must_come(calling: Server, seed: int) -> None:
    answer = ask(calling, "required", seed=seed)
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_one_must_come(calling: Server, name: str) -> None:
    answer = ask(calling, {"type": "function", "function": {"name": name}}, seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name
    check(name, call.function.arguments)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_streamed_is_the_same(calling: Server, choice: str) -> None:
    named = {"type": "function", "function": {"name": "remind"}}
    tool_choice = "required" if choice == "required" else named
    whole = ask(calling, tool_choice, seed=2).choices[0].message.tool_calls
    found: dict[int, list[str]] = {}
    for chunk in ask(calling, tool_choice, seed=2, stream=True):
        for part in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            call = found.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
    # vLLM writes the arguments anew where it has all of them.
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        (call.function.name, json.loads(call.function.arguments)) for call in whole
    ]


def test_without_a_call_the_answer_is_what_it_was(calling: Server) -> None:
    answer = ask(calling, "none", seed=1).choices[0].message
    assert answer.content == "a d q x" and not answer.tool_calls
