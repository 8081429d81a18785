"""What one request may ask of a server: the last that is served, the first that is refused."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.limits import check_request_limits, check_token_limits
from vllm_dllm.requests.options import RequestOptions

VOCABULARY = 512
LIMITS = {
    "n": 4,
    "prompt_logprobs": 60,
    "bad_words": 5,
    "logit_bias": 3,
    "prediction": 6,
    "canvas_length": 8,
}


def of(words: list[list[int]] | None = None, prompt: int = 9, **params: Any) -> Any:
    """Of a request, both checks with these limits."""
    names = params.keys() & {"canvas_length", "prediction", "read_only"}
    options = {name: params.pop(name) for name in names}

    def check(limits: dict[str, int]) -> None:
        made, own = SamplingParams(**params), RequestOptions(**options)
        made._bad_words_token_ids = words
        check_request_limits(RequestLimits(**limits), made, own)
        check_token_limits(RequestLimits(**limits), made, own, prompt, VOCABULARY)

    return check


CHECKED = {
    "n": (of(n=4), of(n=5), "at most 4 answers .* got 5"),
    "bad_words": (of(bad_words=list("abcde")), of(bad_words=list("abcdef")), "got 6"),
    "bad_words, in tokens": (of([[1, 2], [3, 4, 5]]), of([[1, 2], [3, 4, 5, 6]]), "got 6"),
    "logit_bias": (
        of(logit_bias=dict.fromkeys(range(3), 1.0)),
        of(logit_bias=dict.fromkeys(range(4), 1.0)),
        "got 4",
    ),
    "canvas_length": (of(canvas_length=8), of(canvas_length=7), "at least 8 .* got 7"),
    "canvas_length, unless there is but one": (
        of(canvas_length=1, read_only=True),
        of(canvas_length=1),
        "got 1",
    ),
    "prediction": (of(prediction=[1] * 6), of(prediction=[1] * 7), "at most 6 tokens .* got 7"),
    "prompt_logprobs": (
        of(prompt_logprobs=2, prompt=20),
        of(prompt_logprobs=2, prompt=21),
        "at most 60 log-probabilities .* got 63",
    ),
    "prompt_logprobs, of the vocabulary": (
        of(prompt=21),
        of(prompt_logprobs=-1, prompt=1),
        f"got {VOCABULARY}",
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_limits(name: str) -> None:
    served, refused, complaint = CHECKED[name]
    served(LIMITS)
    with pytest.raises(VLLMValidationError, match=complaint) as refusal:
        refused(LIMITS)
    setting = name.partition(",")[0]
    assert f"limits.{setting}" in str(refusal.value)
    refused(LIMITS | {setting: 1 if setting == "canvas_length" else 10**6})
