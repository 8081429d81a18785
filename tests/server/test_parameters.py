"""Each sampling parameter has its effect over HTTP."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.server.conftest import CANVAS, Server
from tests.server.test_openai import chat

# Unlike anything it was trained on: what comes out depends on the noise.
ODD = "kq 7 {w: 3 zx"
NOISY = {"diffusion_max_steps": 3, "diffusion_t_min": 1.0, "diffusion_t_max": 2.0}
EOS = 1


class Answer(NamedTuple):
    tokens: list[int]
    text: str


def ask(server: Server, *, content: str = "Reverse: rose chair lamp", **body: Any) -> Answer:
    body = {"seed": 7, "max_tokens": CANVAS, "return_token_ids": True, **body}
    choice = chat(server, content, extra_body=body).choices[0]
    return Answer(choice.token_ids, choice.message.content)


class Case(NamedTuple):
    effect: dict[str, Any]
    shows: Callable[[Answer], bool]  # with it, and not without
    both: dict[str, Any]


def is_varied(answer: Answer) -> bool:
    """Behind the answer, where nothing but the end is likely."""
    return len(set(answer.tokens)) > 14


NO_END = {"ignore_eos": True}
TO_THE_END: dict[str, Any] = {"ignore_eos": True, "min_tokens": CANVAS}
CASES = {
    "allowed_token_ids": Case(
        {"allowed_token_ids": [20, 21, 22]}, lambda a: set(a.tokens) <= {20, 21, 22}, NO_END
    ),
    "logit_bias": Case({"logit_bias": {"33": 100}}, lambda a: set(a.tokens) == {33}, NO_END),
    "bad_words": Case({"bad_words": ["lamp"]}, lambda a: "lamp" not in a.text, NO_END),
    "min_tokens": Case(
        {"min_tokens": 40}, lambda a: len(a.tokens) >= 40 and EOS not in a.tokens[:40], {}
    ),
    "presence_penalty": Case({"presence_penalty": 2.0}, is_varied, TO_THE_END),
    "frequency_penalty": Case({"frequency_penalty": 2.0}, is_varied, TO_THE_END),
    "repetition_penalty": Case({"repetition_penalty": 4.0}, is_varied, TO_THE_END),
    # All but the most probable token are left out.
    "min_p": Case(
        {"min_p": 1.0},
        lambda a: a.text.startswith("kkk"),
        {"content": ODD, "seed": 1, "vllm_xargs": NOISY},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_effect(server: Server, name: str) -> None:
    case = CASES[name]
    assert case.shows(answer := ask(server, **case.both, **case.effect)), answer
    assert not case.shows(answer := ask(server, **case.both)), answer


def test_n(server: Server) -> None:
    options = {"extra_body": {"vllm_xargs": NOISY}, "max_tokens": CANVAS}
    several = [c.message.content for c in chat(server, ODD, seed=1, n=4, **options).choices]
    each = [chat(server, ODD, seed=1 + i, **options).choices[0].message.content for i in range(4)]
    assert several == each and len(set(several)) > 1
