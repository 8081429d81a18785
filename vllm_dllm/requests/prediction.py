"""Predicted outputs: what a client expects its answer to be."""

import reprlib
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.keys import PREDICTION


def check_prediction(extra: Mapping[str, Any], vocab_size: int) -> None:
    """Of a request's `extra_args`. Raises ValueError."""
    value = extra.get(PREDICTION)
    if value is None:
        return
    is_ids = isinstance(value, list) and all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        for token in value
    )
    if not isinstance(value, str) and not is_ids:
        raise ValueError(
            f"{PREDICTION} must be a text or a list of token ids from 0 to {vocab_size - 1}, got "
            f"{reprlib.repr(value)}."
        )
    if extra.get("diffusion_seed_canvas") is not None:
        raise ValueError(
            f"{PREDICTION} and diffusion_seed_canvas both say what the first canvas holds. Leave "
            f"one out."
        )


def encode(params: SamplingParams, tokenizer: Any) -> None:
    """The prediction as token ids, as the engine reads it.

    Raises:
        VLLMValidationError: becomes HTTP 400; there is no tokenizer to encode a text with.
    """
    text = (params.extra_args or {}).get(PREDICTION)
    if not isinstance(text, str):
        return
    if tokenizer is None:
        raise VLLMValidationError(
            f"{PREDICTION} must be a list of token ids on this server, got a text: it was started "
            f"with --skip-tokenizer-init.",
            parameter=PREDICTION,
        )
    params.extra_args = {**(params.extra_args or {}), PREDICTION: ids_of(text, tokenizer)}


def ids_of(prediction: str | list[int], tokenizer: Any) -> list[int]:
    """A prediction as the engine reads it."""
    if isinstance(prediction, list):
        return prediction
    return tokenizer.encode(prediction, add_special_tokens=False)


def take_openai_prediction(request: Any) -> None:
    """OpenAI's `prediction` of a chat becomes our key, unless the request has both.

    Raises:
        VLLMValidationError: becomes HTTP 400; it is not of the published form.
    """
    prediction = (request.model_extra or {}).get("prediction")
    if prediction is None:
        return
    text = _text_of(prediction)
    if text is None:
        raise VLLMValidationError(
            'prediction must be {"type": "content", "content": ...} with a text or a list of '
            f"parts of type text, got {reprlib.repr(prediction)}.",
            parameter="prediction",
        )
    if (request.vllm_xargs or {}).get(PREDICTION) is not None:
        raise VLLMValidationError(
            f"prediction and {PREDICTION} in vllm_xargs are the same. Leave one out.",
            parameter="prediction",
        )
    request.vllm_xargs = {**(request.vllm_xargs or {}), PREDICTION: text}


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
