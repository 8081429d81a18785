"""Calls that must come, as OpenAI's clients ask for them. The shipped model was trained on none, so
only their form is right."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.calls import SCHEMAS, ask, check, named, require_streamed_is_whole
from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*UNCOMPILED, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(CHECKPOINT, tmp_path_factory.mktemp("calling"), *options) as it:
        yield it


@pytest.mark.parametrize("seed", range(4))
def test_some_call_must_come(calling: Server, seed: int) -> None:
    answer = ask(calling, "required", seed=seed)
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_one_must_come(calling: Server, name: str) -> None:
    answer = ask(calling, named(name), seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name
    check(name, call.function.arguments)


@pytest.mark.parametrize("tool_choice", ["required", named("remind")], ids=["required", "named"])
def test_streamed_is_the_same(calling: Server, tool_choice: Any) -> None:
    require_streamed_is_whole(calling, tool_choice, seed=2)


def test_without_a_call_the_answer_is_what_it_was(calling: Server) -> None:
    answer = ask(calling, "none", seed=1).choices[0].message
    assert answer.content == "a d q x" and not answer.tool_calls
