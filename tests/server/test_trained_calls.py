"""The small model that was trained to call functions: held-out requests, by OpenAI's client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.calls import calls_of, expected_call, streamed_calls
from checkpoints.recipes.exact_match import read_rows
from tests.paths import CHECKPOINTS
from tests.server.conftest import UNCOMPILED, Server, serving

TRAINED = CHECKPOINTS / "diffusiongemma-tiny-tools"
OPTIONS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "gemma4_strict"),
    *("--served-model-name", "calls"),
)
ROWS = read_rows(CHECKPOINTS / "held_out_tools.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(TRAINED, tmp_path_factory.mktemp("trained"), *UNCOMPILED, *OPTIONS) as it:
        yield it


def held_out(task: str, every: int) -> list[dict]:
    return [row for row in ROWS if row["task"] == task][::every]


def ask(server: Server, messages: list[Any], tools: list[dict], **options: Any) -> Any:
    return server.client.chat.completions.create(
        model="calls", messages=messages, tools=tools, max_tokens=128, seed=1, **options
    )


@pytest.mark.parametrize("way", ["auto", "streamed", "required", "named"])
def test_held_out_requests_are_called_rightly(trained: Server, way: str) -> None:
    def is_right(row: dict) -> bool:
        call = expected_call(row)
        named = {"type": "function", "function": {"name": call[0]}}
        choice = {"required": "required", "named": named}.get(way, "auto")
        if way == "streamed":
            chunks = ask(trained, row["messages"], row["tools"], tool_choice=choice, stream=True)
            return streamed_calls(chunks) == [call]
        answer = ask(trained, row["messages"], row["tools"], tool_choice=choice).choices[0]
        return calls_of(answer.message) == [call]

    rows = held_out("call", 8)
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_right, rows)) / len(rows) >= 0.9


def test_the_loop_to_its_end(trained: Server) -> None:
    """The model's call goes back to it with the function's result, which it tells in words."""
    rows = held_out("call_result", 7)
    right = 0
    for row in rows:
        request, _, result = row["messages"]
        called = ask(trained, [request], row["tools"]).choices[0]
        assert called.finish_reason == "tool_calls"
        back = {**result, "tool_call_id": called.message.tool_calls[0].id}
        answer = ask(trained, [request, called.message, back], row["tools"]).choices[0]
        assert not answer.message.tool_calls and answer.finish_reason == "stop"
        right += answer.message.content == row["answer"]
    assert right / len(rows) >= 0.9


def test_nothing_is_called_where_nothing_was_asked_for(trained: Server) -> None:
    rows = held_out("no_call", 7)
    answers = [ask(trained, row["messages"], row["tools"]).choices[0].message for row in rows]
    right = [answer.content == row["answer"] for answer, row in zip(answers, rows, strict=True)]
    assert sum(right) / len(rows) >= 0.9
    assert not any(answer.tool_calls for answer in answers)
