"""Predicted outputs, in which a client says what it expects the answer to be: reads OpenAI's
`prediction`, and counts how much of it the answers have, for `usage`."""

import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.options import PREDICTION


def encode_prediction(prediction: str | list[int], tokenizer: Any) -> list[int]:
    """Returns the token ids of a prediction."""
    if isinstance(prediction, list):
        return prediction
    return tokenizer.encode(prediction, add_special_tokens=False)


def move_openai_prediction(body: dict[str, Any]) -> None:
    """Writes OpenAI's `prediction` in a request's body to our key in `vllm_xargs`.

    Raises:
        VLLMValidationError: becomes HTTP 400; it is not of the published form, or our key is there
            as well.
    """
    prediction = body.get("prediction")
    if prediction is None:
        return
    text = _prediction_text(prediction)
    if text is None:
        raise VLLMValidationError(
            'prediction must be {"type": "content", "content": ...} with a text or a list of '
            f"parts of type text, got {reprlib.repr(prediction)}.",
            parameter="prediction",
        )
    own = body.get("vllm_xargs") or {}
    if not isinstance(own, dict):
        return  # vLLM refuses it
    if own.get(PREDICTION) is not None:
        raise VLLMValidationError(
            f"prediction and {PREDICTION} in vllm_xargs are the same. Leave one out.",
            parameter="prediction",
        )
    body["vllm_xargs"] = {**own, PREDICTION: text}


def _prediction_text(prediction: Any) -> str | None:
    """Returns the text of OpenAI's `prediction`; None if it is not of the published form."""
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


class AcceptedTokenCounter:
    """Counts the tokens of one prediction that appear in a request's answers while they grow.

    OpenAI calls the prediction's tokens that appear in the completion accepted, the others
    rejected. Here these are the tokens of a longest common subsequence of the two: text may be
    added or left out.

    Each answer has a row of bits, one for each token of the prediction. The number of zeros is the
    length of the subsequence: H. Hyyro, "Bit-parallel LCS-length computation revisited" (2004).
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._all = (1 << len(prediction)) - 1
        self._places: dict[int, int] = defaultdict(int)
        for place, token in enumerate(prediction):
            self._places[token] |= 1 << place
        self._rows: dict[Any, int] = {}  # by answer

    def add_tokens(self, answer: Any, tokens: Sequence[int]) -> None:
        """Counts the next tokens of an answer; `answer`: any name of it."""
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


def make_accepted_token_counter(
    params: SamplingParams, tokenizer: Any
) -> AcceptedTokenCounter | None:
    """Returns a counter of how much of a request's prediction its answers contain; None if the
    request has no prediction. Call it once `admit` has checked the request."""
    prediction = (params.extra_args or {}).get(PREDICTION)
    if prediction is None:
        return None
    return AcceptedTokenCounter(encode_prediction(prediction, tokenizer))
