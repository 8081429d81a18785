"""Structured outputs as OpenAI's clients ask for them."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, LengthFinishReasonError
from pydantic import BaseModel

from tests.documents import programs
from tests.server.conftest import Server

ODD = [{"role": "user", "content": "kq 7 {w: 3 zx"}]
KNOWN = [{"role": "user", "content": "Write JSON with name Nora, age 31."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}


class Person(BaseModel):
    name: str
    age: int


def chat(server: Server, messages: list[dict[str, str]] = ODD, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=server.model, messages=messages, **{"max_tokens": 100, "seed": 3, **options}
    )


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def streamed(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_response_format(server: Server) -> None:
    jsonschema.validate(json.loads(text_of(chat(server, response_format=STRICT))), SCHEMA)
    anything = chat(server, response_format={"type": "json_object"})
    assert isinstance(json.loads(text_of(anything)), dict)


def test_what_the_model_would_have_said(server: Server) -> None:
    answer = text_of(chat(server, KNOWN, response_format=STRICT))
    assert json.loads(answer) == {"name": "Nora", "age": 31} and answer == text_of(
        chat(server, KNOWN)
    )


def test_streamed_is_the_same(server: Server) -> None:
    whole = text_of(chat(server, response_format=STRICT))
    assert streamed(chat(server, response_format=STRICT, stream=True)) == whole


def test_parse(server: Server) -> None:
    answer = server.client.chat.completions.parse(
        model=server.model, messages=KNOWN, max_tokens=64, response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Nora", age=31)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"json": {"enum": [1, 2, 3]}}, "[123]"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_completions(server: Server, wanted: dict[str, Any], pattern: str) -> None:
    answer = server.client.completions.create(
        model=server.model,
        prompt="kq 7 {w: 3 zx",
        max_tokens=40,
        extra_body={"structured_outputs": wanted},
    )
    assert re.fullmatch(pattern, answer.choices[0].text.strip())


def test_responses(server: Server) -> None:
    answer = server.client.responses.parse(
        model=server.model,
        input="Write JSON with name Nora, age 31.",
        max_output_tokens=64,
        text_format=Person,
    )
    assert answer.output_parsed == Person(name="Nora", age=31)


def test_documented_program(server: Server) -> None:
    (text,) = (p.text for p in programs() if p.text.startswith("from pydantic import BaseModel"))
    done = subprocess.run(
        [sys.executable, "-c", text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "name='Nora' age=31\n", done.stderr


UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    },
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unsupported keyword": (
        {"json": UNIQUE},
        r"structured_outputs.json cannot be used: .*uniqueItems.*#/properties/tags/uniqueItems",
    ),
    "unknown type": ({"json": {"type": "strin"}}, "Invalid type: strin .*#/type"),
    "no JSON": ({"json": "{"}, "structured_outputs.json cannot be used"),
    "endless reference": ({"json": ENDLESS}, "no answer of at most .* tokens was found"),
    "endless rule": ({"grammar": 'start: "a" start'}, "no answer of at most"),
    "regex": ({"regex": "["}, "structured_outputs.regex cannot be used: .*regex"),
    "catastrophic regex": ({"regex": "(ab|c)?" * 2000}, "structured_outputs.regex cannot be used"),
    "megabyte": ({"regex": "a" * 1_000_000}, "at most 16384 bytes, got 1000000"),
    "megabyte of choices": (
        {"choice": [f"x{i}" for i in range(90_000)]},
        "structured_outputs.choice cannot be used: it must be at most",
    ),
    "no choice": ({"choice": []}, "choice"),
    "empty grammar": ({"grammar": " "}, "grammar"),
    "nested": ({"json": json.loads('{"not":' * 200 + "{}" + "}" * 200)}, "nested too deeply"),
    "tag without triggers": (
        {"structural_tag": json.dumps({"structures": []})},
        "structural_tag",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars(server: Server, name: str) -> None:
    """Within 5 s; others are answered meanwhile."""
    wanted, message = BAD[name]
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(chat, server, KNOWN) for _ in range(2)]
        with pytest.raises(BadRequestError, match=message):
            chat(server, extra_body={"structured_outputs": wanted})
        assert {text_of(other.result()) for other in others} == {'{"name": "Nora", "age": 31}'}


def test_too_few_tokens(server: Server) -> None:
    with pytest.raises(BadRequestError, match=r"max_tokens must be at least 8 .* got 5"):
        chat(server, response_format=STRICT, max_tokens=5)


def test_as_many_tokens_as_it_takes(server: Server) -> None:
    """The answer has the form, but uses them up, and OpenAI's `parse` takes it for a part."""
    answer = chat(server, response_format=STRICT, max_tokens=8)
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(LengthFinishReasonError):
        server.client.chat.completions.parse(
            model=server.model, messages=ODD, max_tokens=8, response_format=Person
        )


def test_min_tokens(server: Server) -> None:
    """An answer ends before only where its form does."""
    words = {"structured_outputs": {"regex": "([a-z]{1,3} )+"}, "min_tokens": 30}
    answer = chat(server, extra_body=words, max_tokens=60)
    assert 30 < answer.usage.completion_tokens <= 60
    assert re.fullmatch("([a-z]{1,3} )+", text_of(answer))
    held = {"response_format": STRICT, "extra_body": {"min_tokens": 90}}
    jsonschema.validate(json.loads(text_of(chat(server, **held))), SCHEMA)


def test_many_at_once(server: Server) -> None:
    """Constrained and free ones; the scheduler's own grammars have nothing to complain about."""
    with ThreadPoolExecutor(16) as pool:
        held = [pool.submit(chat, server, response_format=STRICT, seed=i) for i in range(6)]
        free = [pool.submit(chat, server, KNOWN, seed=i) for i in range(4)]
        for answer in held:
            jsonschema.validate(json.loads(text_of(answer.result())), SCHEMA)
        assert {text_of(answer.result()) for answer in free} == {'{"name": "Nora", "age": 31}'}
    assert "grammar rejected" not in server.log.read_text()
