"""The small model that was trained to call functions: held-out requests, by OpenAI's client."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.calls import PARSER, WAYS, Asked, calls_of, measure_calls, measure_loop, measure_words
from checkpoints.recipes.exact_match import read_rows
from tests.paths import CHECKPOINTS
from tests.server.conftest import UNCOMPILED, serving

TRAINED = CHECKPOINTS / "diffusiongemma-tiny-tools"
ROWS = read_rows(CHECKPOINTS / "held_out_tools.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with serving(TRAINED, tmp_path_factory.mktemp("trained"), *UNCOMPILED, *PARSER) as it:
        yield Asked(it.port, TRAINED)


def held_out(task: str, every: int) -> list[dict]:
    return [row for row in ROWS if row["task"] == task][::every]


@pytest.mark.parametrize("way", WAYS)
def test_held_out_requests_are_called_rightly(trained: Asked, way: str) -> None:
    assert measure_calls(trained, held_out("call", 8), way)["exact_match"] >= 0.9


def test_the_loop_to_its_end(trained: Asked) -> None:
    """The model's call goes back to it with the function's result, which it tells in words."""
    assert measure_loop(trained, held_out("call_result", 7))["exact_match"] >= 0.9


def test_nothing_is_called_where_nothing_was_asked_for(trained: Asked) -> None:
    assert measure_words(trained, held_out("no_call", 7))["exact_match"] >= 0.9


@pytest.mark.parametrize("way", ["auto", "required", "named"])
def test_an_answer_that_does_not_fit_says_so(trained: Asked, way: str) -> None:
    """Streamed or not. Where a call must come, it is one that fits; otherwise none is finished for
    the model. How an answer is read that is cut anywhere:
    `tests/unit/requests/test_gemma_tool_parser.py`.
    """
    row = held_out("call", 8)[0]
    named: Any = {"type": "function", "function": {"name": "wall"}}
    options: Any = {"tools": row["tools"], "tool_choice": named if way == "named" else way}

    def ask(most: int, **more: Any) -> Any:
        return trained.client.chat.completions.create(
            model=str(TRAINED),
            messages=row["messages"],
            seed=1,
            **{"max_tokens": most, **options, **more},
        )

    whole = ask(128)
    uncut, length = whole.choices[0], whole.usage.completion_tokens
    assert uncut.finish_reason == ("stop" if way == "named" else "tool_calls")
    for most in (14, 16, 18, length - 1):  # the last has the call and no end
        cut = ask(most).choices[0]
        calls = calls_of(cut.message)
        assert calls or way == "auto"
        assert (calls == calls_of(uncut.message)) == (most == length - 1)
        assert cut.finish_reason == "length" and not cut.message.content
        *_, last = (chunk.choices[0] for chunk in ask(most, stream=True) if chunk.choices)
        assert last.finish_reason == "length"
