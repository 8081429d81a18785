"""How much of a predicted output the answers took, for `usage`.

OpenAI calls the prediction's tokens that appear in the completion accepted, the others rejected.
Here those appear that are a longest common subsequence of the two: text may be added or left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_dllm.requests.options import PREDICTION
from vllm_dllm.requests.prediction import ids_of


class AcceptedTokens:
    """Counts what any number of answers that grow take of one prediction.

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
