"""Predicted outputs as OpenAI's clients send them: what they expect the answer of a chat to be."""

import reprlib
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.requests.options import PREDICTION


def ids_of(prediction: str | list[int], tokenizer: Any) -> list[int]:
    """A prediction as the engine reads it."""
    if isinstance(prediction, list):
        return prediction
    return tokenizer.encode(prediction, add_special_tokens=False)


def take_openai_prediction(body: dict[str, Any]) -> None:
    """OpenAI's `prediction` in a request's body becomes our key, unless the request has both.

    Raises:
        VLLMValidationError: becomes HTTP 400; it is not of the published form.
    """
    prediction = body.get("prediction")
    if prediction is None:
        return
    text = _text_of(prediction)
    if text is None:
        raise VLLMValidationError(
            'prediction must be {"type": "content", "content": ...} with a text or a list of '
            f"parts of type text, got {reprlib.repr(prediction)}.",
            parameter="prediction",
        )
    own = body.get("vllm_xargs") or {}
    if not isinstance(own, dict):
        return  # which vLLM refuses
    if own.get(PREDICTION) is not None:
        raise VLLMValidationError(
            f"prediction and {PREDICTION} in vllm_xargs are the same. Leave one out.",
            parameter="prediction",
        )
    body["vllm_xargs"] = {**own, PREDICTION: text}


def _text_of(prediction: Any) -> str | None:
    if not isinstance(prediction, Mapping) or prediction.get("type") != "content":
        return None
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
