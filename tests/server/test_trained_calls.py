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


WALL = held_out("call", 8)[0]
MARKERS = ("<|", "|>")
Seen = tuple[str, list[tuple[str, str]], str]


def whole(server: Server, **options: Any) -> Seen:
    """Content, calls and why it ended."""
    choice = server.client.chat.completions.create(**options).choices[0]
    calls = choice.message.tool_calls or ()
    found = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content or "", found, choice.finish_reason


def streamed(server: Server, **options: Any) -> Seen:
    content, end, found = "", "", dict[int, list[str]]()
    for chunk in server.client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            content, end = content + (choice.delta.content or ""), choice.finish_reason or end
            for part in choice.delta.tool_calls or ():
                call = found.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
    return content, [(name, arguments) for name, arguments in found.values()], end


def both_ways(server: Server, **options: Any) -> Seen:
    asked = {"messages": WALL["messages"], "tools": WALL["tools"], "max_tokens": 128, **options}
    seen = whole(server, model="calls", seed=1, **asked)
    assert seen == streamed(server, model="calls", seed=1, **asked), options
    assert not any(marker in seen[0] for marker in MARKERS)
    return seen


@pytest.fixture(scope="module")
def uncut(trained: Server) -> Seen:
    seen = both_ways(trained)
    assert seen[2] == "tool_calls" and len(seen[1]) == 1
    return seen


def test_at_every_length(trained: Server, uncut: Seen) -> None:
    """Nothing that is cut is a call, and nothing is finished for the model."""
    for most in range(1, 33):
        content, calls, end = both_ways(trained, max_tokens=most)
        assert content == "" and calls in ([], uncut[1]), most
        assert end == ("length" if not calls else end) and end in ("length", "tool_calls"), most
    assert calls and end == "tool_calls"


@pytest.mark.parametrize("way", ["required", "named"])
def test_a_call_that_must_come_and_does_not_fit_says_so(
    trained: Server, uncut: Seen, way: str
) -> None:
    named = {"type": "function", "function": {"name": "wall"}}
    for most in (14, 16, 18):
        _, calls, end = both_ways(
            trained, max_tokens=most, tool_choice=named if way == "named" else way
        )
        assert calls and calls != uncut[1] and end == "length"


def test_a_form_beside_calls(trained: Server, uncut: Seen) -> None:
    assert both_ways(trained, response_format={"type": "json_object"}) == uncut
    for most in (6, 12, 16):
        _, calls, end = both_ways(trained, max_tokens=most, response_format={"type": "json_object"})
        assert not calls and end == "length"
    content, calls, _ = both_ways(
        trained,
        messages=[{"role": "user", "content": "Sort: q d x a"}],
        extra_body={"structured_outputs": {"grammar": "start: /[a-z]( [a-z]){3}/"}},
    )
    assert not calls and len(content) == 7
