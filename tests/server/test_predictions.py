"""Predicted outputs over HTTP: what `usage` says of them."""

from typing import Any

from tests.server.conftest import Server

MESSAGES = [{"role": "user", "content": "Reverse: rose chair lamp"}]
EXPECTED = "lamp rose"  # the answer has all of it, and more


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_a_chat(server: Server) -> None:
    options: dict[str, Any] = dict(
        model=server.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=32,
        prediction={"type": "content", "content": EXPECTED},
    )
    whole = server.client.chat.completions.create(**options)
    assert whole.choices[0].message.content == "lamp chair rose"
    accepted, rejected = details(whole.usage)
    assert accepted > 0 and rejected == 0

    with_usage = dict(stream=True, stream_options={"include_usage": True})
    *chunks, last = server.client.chat.completions.create(**options, **with_usage)
    assert details(last.usage) == (accepted, rejected)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)

    two = server.client.chat.completions.create(**options | dict(n=2, temperature=1))
    assert sum(details(two.usage)) == 2 * accepted


def test_a_completion(server: Server) -> None:
    def ask(predicted: list[int], **options: Any) -> Any:
        return server.client.completions.create(
            model=server.model,
            prompt=[[5, 6, 7], [5, 6, 7]],
            temperature=0,
            max_tokens=20,
            extra_body={
                "return_token_ids": True,
                "ignore_eos": True,
                "vllm_xargs": {"diffusion_prediction": predicted},
            },
            **options,
        )

    free = ask([])
    answer, unused = free.choices[0].token_ids, 3
    assert details(free.usage) == (0, 0)
    assert unused not in answer

    streamed = dict(stream=True, stream_options={"include_usage": True})
    for predicted in ([unused, unused], [unused, *answer]):
        whole = ask(predicted)
        hit = [predicted[1:] == choice.token_ids for choice in whole.choices]
        accepted, rejected = details(whole.usage)
        assert accepted + rejected == 2 * len(predicted)
        assert rejected >= 2  # the unused token, in both answers
        assert accepted == 2 * len(answer) or not all(hit)
        *_, last = ask(predicted, **streamed)
        assert details(last.usage) == (accepted, rejected)


def test_nothing_is_said_without_a_prediction(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=32
    )
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is details.rejected_prediction_tokens is None
