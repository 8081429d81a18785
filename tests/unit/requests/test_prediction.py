"""What a request may say of the answer that it expects."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.options import RequestOptions, check_request
from vllm_dllm.requests.prediction import encode, take_openai_prediction

MESSAGES = [{"role": "user", "content": "Hi"}]
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text])


def params(**extra: Any) -> SamplingParams:
    return SamplingParams(extra_args={f"diffusion_{key}": value for key, value in extra.items()})


@pytest.mark.parametrize("value", ["some text", "", [1, 511], []], ids=repr)
def test_texts_and_token_ids(value: Any) -> None:
    check_request(params(prediction=value), canvas_length=4, vocab_size=512)


@pytest.mark.parametrize("value", [5, [1, -1], [512], [True], ["a"], {"type": "content"}], ids=repr)
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match="must be a text or a list of token ids from 0"):
        check_request(params(prediction=value), canvas_length=4, vocab_size=512)


def test_not_beside_a_first_canvas() -> None:
    both = params(prediction="a", seed_canvas=[1, 2, 3, 4])
    with pytest.raises(VLLMValidationError, match="both say what the first canvas holds"):
        check_request(both, canvas_length=4, vocab_size=512)


def test_the_engine_reads_token_ids() -> None:
    given = params(prediction="AB", max_steps=3)
    sent = given.extra_args
    encode(given, TOKENIZER)
    assert given.extra_args == {"diffusion_prediction": [65, 66], "diffusion_max_steps": 3}
    assert sent == {"diffusion_prediction": "AB", "diffusion_max_steps": 3}  # the caller's own
    assert RequestOptions.from_sampling_params(given, {}).prediction == [65, 66]
    encode(given, None)  # ids need no tokenizer
    assert RequestOptions.from_sampling_params(SamplingParams(), {}).prediction == []


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(VLLMValidationError, match="started with --skip-tokenizer-init"):
        encode(params(prediction="AB"), None)


def chat(prediction: Any, **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=MESSAGES, prediction=prediction, **fields)


@pytest.mark.parametrize(
    "content", ["AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]], ids=type
)
def test_openais_prediction(content: Any) -> None:
    request = chat({"type": "content", "content": content}, vllm_xargs={"diffusion_max_steps": 2})
    take_openai_prediction(request)
    assert request.vllm_xargs == {"diffusion_max_steps": 2, "diffusion_prediction": "AB"}


def test_a_chat_without_one() -> None:
    request = chat(None)
    take_openai_prediction(request)
    assert request.vllm_xargs is None


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
        take_openai_prediction(chat(prediction))


def test_both_names_at_once() -> None:
    request = chat({"type": "content", "content": "A"}, vllm_xargs={"diffusion_prediction": "B"})
    with pytest.raises(VLLMValidationError, match="Leave one out"):
        take_openai_prediction(request)
