"""Two functions that a model may call, and how OpenAI's client asks for a call."""

import json
from typing import Any

import jsonschema

from tests.server.conftest import Server


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


def ask(server: Server, tool_choice: Any, **options: Any) -> Any:
    return server.client.chat.completions.create(
        messages=MESSAGES,
        tool_choice=tool_choice,
        **{"model": server.model, "tools": TOOLS, "max_tokens": 120, **options},
    )


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def named(name: str) -> dict[str, Any]:
    """A `tool_choice`."""
    return {"type": "function", "function": {"name": name}}


def require_streamed_is_whole(server: Server, tool_choice: Any, **options: Any) -> None:
    whole = ask(server, tool_choice, **options).choices[0].message.tool_calls
    found: dict[int, list[str]] = {}
    for chunk in ask(server, tool_choice, stream=True, **options):
        for part in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            call = found.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
    # vLLM writes the arguments anew where it has all of them.
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        (call.function.name, json.loads(call.function.arguments)) for call in whole
    ]
