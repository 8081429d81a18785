"""Predicted outputs, in which a client says what it expects the answer to be. Reads OpenAI's
`prediction`, and counts for `usage` how much of it the answers contain."""

import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.limits import refusal
from vllm_dllm.requests.options import PREDICTION


def encode_prediction(prediction: str | list[int], tokenizer: Any) -> list[int]:
    """Returns a prediction's token ids, of a text without special tokens. A list stays as it is."""
    if isinstance(prediction, list):
        return prediction
    return list(_encode_text(prediction, tokenizer))


@lru_cache(maxsize=4)
def _encode_text(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Returns the token ids of a text. Cached, since all prompts of a request have the same."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def move_openai_prediction(body: dict[str, Any]) -> None:
    """Copies the text of OpenAI's `prediction` in a request's body to our key in `vllm_xargs`, in
    place. Does nothing without a `prediction`, or if `vllm_xargs` is no object, which vLLM refuses.
    Raises VLLMValidationError, which becomes HTTP 400, if `prediction` is not of the published
    form, or the request also has our key."""
    prediction = body.get("prediction")
    if prediction is None:
        return
    text = _prediction_text(prediction)
    if text is None:
        raise refusal(
            'prediction must be {"type": "content", "content": ...} with a text or a list of '
            f"parts of type text, got {reprlib.repr(prediction)}."
        )
    own = body.get("vllm_xargs") or {}
    if not isinstance(own, dict):
        return  # vLLM refuses it
    if own.get(PREDICTION) is not None:
        raise refusal(f"prediction and {PREDICTION} in vllm_xargs are the same. Leave one out.")
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
    """Counts the tokens of one prediction that appear in a request's answers while these grow.

    OpenAI calls the prediction's tokens that appear in the completion accepted, and all others
    rejected. Here the accepted tokens are a longest common subsequence of prediction and answer: an
    answer may add or leave out text.

    Each answer has an integer with one bit for each token of the prediction. The number of its
    zeros is the length of the subsequence: H. Hyyro, "Bit-parallel LCS-length computation
    revisited" (2004).
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._all = (1 << len(prediction)) - 1
        self._places: dict[int, int] = defaultdict(int)
        for place, token in enumerate(prediction):
            self._places[token] |= 1 << place
        self._rows: dict[Any, int] = {}  # answer -> its integer of bits

    def add_tokens(self, answer: Any, tokens: Sequence[int]) -> None:
        """Counts the next tokens of an answer. `answer`: any hashable value that tells it apart."""
        row = self._rows.get(answer, self._all)
        for token in tokens:
            if places := self._places.get(token):
                matches = row & places
                row = (row + matches | row - matches) & self._all
        self._rows[answer] = row

    def counts(self) -> dict[str, int]:
        """Returns the numbers of accepted and rejected tokens of all answers, by OpenAI's names."""
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
    request has no prediction. `params`: the client's, which `admit` has checked."""
    prediction = (params.extra_args or {}).get(PREDICTION)
    if prediction is None:
        return None
    return AcceptedTokenCounter(encode_prediction(prediction, tokenizer))
