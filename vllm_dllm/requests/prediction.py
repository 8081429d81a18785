"""Predicted outputs, as OpenAI's clients send them: what they expect the answer of a chat to be;
and how much of it the answers took, for `usage`."""

import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

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


class AcceptedTokens:
    """Counts what any number of answers that grow take of one prediction.

    OpenAI calls the prediction's tokens that appear in the completion accepted, the others
    rejected. Here those appear that are a longest common subsequence of the two: text may be added
    or left out.

    Bit i of a row stands for token i of the prediction, and is 0 where one more token of the
    answer so far is found: H. Hyyro, "Bit-parallel LCS-length computation revisited" (2004). A
    token of an answer costs a sum of integers of as many bits.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._all = (1 << len(prediction)) - 1
        self._places: dict[int, int] = defaultdict(int)
        for place, token in enumerate(prediction):
            self._places[token] |= 1 << place
        self._rows: dict[Any, int] = {}

    def add(self, answer: Any, tokens: Sequence[int]) -> None:
        """`tokens` are the next of the answer that `answer` names."""
        row = self._rows.get(answer, self._all)
        for token in tokens:
            if places := self._places.get(token):
                found = row & places
                row = (row + found | row - found) & self._all
        self._rows[answer] = row

    def counts(self) -> dict[str, int]:
        """Returns the counts of all answers together, as OpenAI names them."""
        rejected = sum(row.bit_count() for row in self._rows.values())
        predicted = len(self._rows) * self._all.bit_length()
        return {
            "accepted_prediction_tokens": predicted - rejected,
            "rejected_prediction_tokens": rejected,
        }


def accepted_tokens(params: SamplingParams, tokenizer: Any) -> AcceptedTokens | None:
    """Makes a counter for a request, after its checks; None if it predicts nothing."""
    prediction = (params.extra_args or {}).get(PREDICTION)
    return None if prediction is None else AcceptedTokens(ids_of(prediction, tokenizer))
