"""Predicted outputs as OpenAI's clients send them, and how much of one the answers took."""

import random
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.prediction import (
    AcceptedTokenCounter,
    encode_prediction,
    make_accepted_token_counter,
    move_openai_prediction,
)


def moved(**body: Any) -> Any:
    move_openai_prediction(body)
    return body.get("vllm_xargs")


def test_openais_prediction() -> None:
    for content in ("AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]):
        prediction, own = {"type": "content", "content": content}, {"diffusion_max_steps": 2}
        assert moved(prediction=prediction, vllm_xargs=own) == {
            **own,
            "diffusion_prediction": "AB",
        }
    assert moved() is moved(prediction=None) is None
    # Keys of another type are vLLM's to refuse.
    assert moved(prediction=prediction, vllm_xargs=[1]) == [1]


OTHER_FORMS: list[Any] = [
    "AB",
    {"type": "text", "content": "A"},
    {"type": "content"},
    {"type": "content", "content": 5},
    {"type": "content", "content": [{"type": "image_url"}]},
    {"type": "content", "content": ["A"]},
]


@pytest.mark.parametrize("prediction", OTHER_FORMS, ids=repr)
def test_another_form(prediction: Any) -> None:
    with pytest.raises(VLLMValidationError, match="prediction must be "):
        moved(prediction=prediction)


def test_both_names_at_once() -> None:
    prediction, own = {"type": "content", "content": "A"}, {"diffusion_prediction": "B"}
    with pytest.raises(VLLMValidationError, match="Leave one out"):
        moved(prediction=prediction, vllm_xargs=own)


TOKENIZER = Mock(encode=lambda text, add_special_tokens: [ord(c) for c in text])


def common(first: list[int], second: list[int]) -> int:
    """The length of a longest common subsequence, by the textbook's table."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else longer
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(50))
def test_as_the_textbook_counts(seed: int) -> None:
    draw = random.Random(seed)
    predicted, answer = ([draw.randrange(6) for _ in range(draw.randrange(90))] for _ in range(2))
    counter = AcceptedTokenCounter(predicted)
    while_growing = []
    for begin in range(0, max(len(answer), 1), 7):
        counter.add_tokens("first", answer[begin : begin + 7])
        while_growing.append(counter.counts()["accepted_prediction_tokens"])
        assert while_growing[-1] == common(predicted, answer[: begin + 7])
    assert counter.counts() == {
        "accepted_prediction_tokens": while_growing[-1],
        "rejected_prediction_tokens": len(predicted) - while_growing[-1],
    }


def test_all_answers_count() -> None:
    counter = AcceptedTokenCounter([1, 2, 3])
    counter.add_tokens((0, 0), [1, 9, 3])
    counter.add_tokens((0, 1), [])
    assert counter.counts() == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}


def test_a_text_is_read_once() -> None:
    """Each prompt of a request, and the count of all, has the same."""
    encode = Mock(side_effect=lambda text, add_special_tokens: [*text.encode()])
    tokenizer = Mock(encode=encode)
    tokens = [encode_prediction("read once", tokenizer) for _ in range(64)]
    assert encode.call_count == 1 and tokens == [[*b"read once"]] * 64


def test_of_a_request() -> None:
    for prediction in ("AB", [65, 66]):
        params = SamplingParams(extra_args={"diffusion_prediction": prediction})
        counter = make_accepted_token_counter(params, TOKENIZER)
        assert counter is not None
        counter.add_tokens(0, [66])
        assert counter.counts()["accepted_prediction_tokens"] == 1
    assert make_accepted_token_counter(SamplingParams(), TOKENIZER) is None
