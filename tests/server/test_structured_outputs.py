"""Structured outputs as OpenAI's clients ask for them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError
from pydantic import BaseModel

from tests.documents import programs
from tests.processes import output_of
from tests.server.conftest import Server
from tests.unit.requests.test_structured_outputs import ENDLESS

ODD, KNOWN = "kq 7 {w: 3 zx", "Write JSON with name Nora, age 31."
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


def chat(server: Server, content: str = ODD, **options: Any) -> str:
    answer = server.chat(content, **{"max_tokens": 100, "seed": 3, **options})
    return answer.choices[0].message.content


def test_response_format(server: Server) -> None:
    jsonschema.validate(json.loads(chat(server, response_format=STRICT)), SCHEMA)
    anything = chat(server, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything), dict)


def test_completions(server: Server) -> None:
    """Every kind of form: `tests/engine/test_grammars.py`."""
    answer = server.client.completions.create(
        model=server.model,
        prompt=ODD,
        max_tokens=40,
        extra_body={"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}},
    )
    assert re.fullmatch("[a-z]{3}-[0-9]{2}", answer.choices[0].text.strip())


def test_responses(server: Server) -> None:
    answer = server.client.responses.parse(
        model=server.model, input=KNOWN, max_output_tokens=64, text_format=Person
    )
    assert answer.output_parsed == Person(name="Nora", age=31)


def test_documented_program(server: Server) -> None:
    (text,) = (p.text for p in programs() if p.text.startswith("from pydantic import BaseModel"))
    there = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    assert output_of("-c", there) == "name='Nora' age=31\n"


def test_bad_grammars(server: Server) -> None:
    """Within 5 s; others are answered meanwhile."""
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(chat, server, KNOWN) for _ in range(2)]
        with pytest.raises(BadRequestError, match=r"no answer of at most .* tokens was found"):
            chat(server, extra_body={"structured_outputs": {"json": ENDLESS}})
        assert {other.result() for other in others} == {'{"name": "Nora", "age": 31}'}
