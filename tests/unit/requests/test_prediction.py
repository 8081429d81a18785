"""Predicted outputs as OpenAI's clients send them."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_dllm.requests.prediction import move_openai_prediction


@pytest.mark.parametrize(
    "content", ["AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]], ids=type
)
def test_openais_prediction(content: Any) -> None:
    body = {
        "prediction": {"type": "content", "content": content},
        "vllm_xargs": {"diffusion_max_steps": 2},
    }
    move_openai_prediction(body)
    assert body["vllm_xargs"] == {"diffusion_max_steps": 2, "diffusion_prediction": "AB"}


@pytest.mark.parametrize("body", [{}, {"prediction": None}])
def test_a_chat_without_one(body: dict[str, Any]) -> None:
    move_openai_prediction(body)
    assert "vllm_xargs" not in body


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
        move_openai_prediction({"prediction": prediction})


def test_both_names_at_once() -> None:
    own = {"diffusion_prediction": "B"}
    body = {"prediction": {"type": "content", "content": "A"}, "vllm_xargs": own}
    with pytest.raises(VLLMValidationError, match="Leave one out"):
        move_openai_prediction(body)


def test_keys_of_another_type_are_vllms_to_refuse() -> None:
    body = {"prediction": {"type": "content", "content": "A"}, "vllm_xargs": [1]}
    move_openai_prediction(body)
    assert body["vllm_xargs"] == [1]
