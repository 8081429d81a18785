"""Predicted outputs over HTTP: what `usage` says of them."""

from typing import Any

import pytest

from tests.server.conftest import Server

QUESTION = "Reverse: rose chair lamp"
EXPECTED = "lamp rose"  # the answer has all of it, and more


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_a_chat(server: Server) -> None:
    options: dict[str, Any] = dict(
        temperature=0, max_tokens=32, prediction={"type": "content", "content": EXPECTED}
    )
    whole = server.chat(QUESTION, **options)
    assert whole.choices[0].message.content == "lamp chair rose"
    accepted, rejected = details(whole.usage)
    assert accepted > 0 and rejected == 0

    with_usage = dict(stream=True, stream_options={"include_usage": True})
    *chunks, last = server.chat(QUESTION, **options, **with_usage)
    assert details(last.usage) == (accepted, rejected)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)

    two = server.chat(QUESTION, **options | dict(n=2, temperature=1))
    assert sum(details(two.usage)) == 2 * accepted


@pytest.mark.parametrize("is_right", [False, True], ids=["wrong", "right but for its beginning"])
def test_a_completion(server: Server, is_right: bool) -> None:
    """Of two prompts, whose answers count together."""

    def ask(predicted: list[int], **options: Any) -> Any:
        extra = {"ignore_eos": True, "vllm_xargs": {"diffusion_prediction": predicted}}
        return server.client.completions.create(
            model=server.model,
            prompt=[[5, 6, 7], [5, 6, 7]],
            temperature=0,
            max_tokens=20,
            extra_body={"return_token_ids": True, **extra},
            **options,
        )

    free = ask([])
    answer, unused = free.choices[0].token_ids, 3
    assert details(free.usage) == (0, 0) and unused not in answer
    predicted = [unused, *answer] if is_right else [unused, unused]
    whole = ask(predicted)
    accepted, rejected = details(whole.usage)
    assert accepted + rejected == 2 * len(predicted) and rejected >= 2  # the unused one, twice
    if all(choice.token_ids == answer for choice in whole.choices):
        assert accepted == (2 * len(answer) if is_right else 0)
    *_, last = ask(predicted, stream=True, stream_options={"include_usage": True})
    assert details(last.usage) == (accepted, rejected)


def test_nothing_is_said_without_a_prediction(server: Server) -> None:
    details = server.chat(QUESTION, max_tokens=32).usage.completion_tokens_details
    assert details.accepted_prediction_tokens is details.rejected_prediction_tokens is None
