"""What one request may ask of a server: the last that is served, the first that is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.limits import RequestLimits
from vllm_dllm.requests.limits import check_parameters, check_size, check_tokens

VOCABULARY = 512
LIMITS = {
    "n": 4,
    "prompt_logprobs": 60,
    "bad_words": 5,
    "logit_bias": 3,
    "prediction": 6,
    "canvas_length": 8,
}


def config(**limits: Any) -> Any:
    return SimpleNamespace(
        additional_config={"vllm_dllm": {"limits": limits}},
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
    )


def params(**options: Any) -> SamplingParams:
    words = options.pop("bad_words_token_ids", None)
    made = SamplingParams(**options)
    made._bad_words_token_ids = words
    return made


def width(length: int) -> SamplingParams:
    return params(extra_args={"diffusion_canvas_length": length})


CHECKED = {
    "n": (check_parameters, [params(n=4)], [params(n=5)], "got 5"),
    "bad_words": (
        check_parameters,
        [params(bad_words=list("abcde"))],
        [params(bad_words=list("abcdef"))],
        "got 6",
    ),
    "logit_bias": (
        check_parameters,
        [params(logit_bias=dict.fromkeys(range(3), 1.0))],
        [params(logit_bias=dict.fromkeys(range(4), 1.0))],
        "got 4",
    ),
    "canvas_length": (check_parameters, [width(8)], [width(7)], "at least 8 .* got 7"),
    "tokens of bad_words": (
        check_tokens,
        [params(bad_words_token_ids=[[1, 2], [3, 4, 5]]), 9],
        [params(bad_words_token_ids=[[1, 2], [3, 4, 5, 6]]), 9],
        "got 6",
    ),
    "prediction": (
        check_tokens,
        [params(extra_args={"diffusion_prediction": [1] * 6}), 9],
        [params(extra_args={"diffusion_prediction": [1] * 7}), 9],
        "at most 6 tokens .* got 7",
    ),
    "prompt_logprobs": (
        check_tokens,
        [params(prompt_logprobs=2), 20],
        [params(prompt_logprobs=2), 21],
        "at most 60 log-probabilities .* got 63",
    ),
    "prompt_logprobs of the vocabulary": (
        check_tokens,
        [params(prompt_logprobs=None), 21],
        [params(prompt_logprobs=-1), 1],
        f"got {VOCABULARY}",
    ),
    "n of a chat": (
        check_size,
        [ChatCompletionRequest(messages=[], n=4), [9]],
        [ChatCompletionRequest(messages=[], n=5), [9]],
        "got 5",
    ),
    "n of several prompts": (
        check_size,
        [CompletionRequest(prompt="Hi", n=2), [9, 9]],
        [CompletionRequest(prompt="Hi", n=2), [9, 9, 9]],
        "n must ask for at most 4 answers .* got 6",
    ),
    "prompt_logprobs of several prompts": (
        check_size,
        [CompletionRequest(prompt="Hi", prompt_logprobs=1), [15, 15]],
        [CompletionRequest(prompt="Hi", prompt_logprobs=1), [15, 16]],
        "got 62",
    ),
    "logprobs of an echo": (
        check_size,
        [CompletionRequest(prompt="Hi", echo=False, logprobs=2), [21]],
        [CompletionRequest(prompt="Hi", echo=True, logprobs=2), [21]],
        "got 63",
    ),
}


SETTINGS = {"tokens of bad_words": "bad_words", "logprobs of an echo": "prompt_logprobs"}


@pytest.mark.parametrize("name", CHECKED)
def test_limits(name: str) -> None:
    check, served, refused, complaint = CHECKED[name]
    check(config(**LIMITS), *served)
    with pytest.raises(VLLMValidationError, match=complaint) as refusal:
        check(config(**LIMITS), *refused)
    setting = name.split()[0] if name.split()[0] in LIMITS else SETTINGS[name]
    assert f"limits.{setting}" in str(refusal.value)
    check(config(**LIMITS | {setting: 1 if setting == "canvas_length" else 10**6}), *refused)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"n": 0}, "limits.n must be an integer >= 1 and <= .*, got 0"),
        ({"steps": 3}, "limits must be an object with the keys .*bad_words"),
        ([], "limits must be an object"),
    ],
)
def test_unusable_settings(section: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExtensionConfig.from_additional_config({"vllm_dllm": {"limits": section}})


def test_a_width_of_another_type_is_left_to_vllms_check() -> None:
    for width in ("7", 7.5, [7], float("nan")):
        check_parameters(config(), params(extra_args={"diffusion_canvas_length": width}))


def test_one_canvas_may_be_narrow() -> None:
    read_only = {"diffusion_canvas_length": 1, "diffusion_read_only": 1}
    check_parameters(config(), params(extra_args=read_only))


def test_limits_are_documented_with_their_defaults() -> None:
    from tests.paths import ROOT

    page = (ROOT / "docs" / "serving.md").read_text()
    for name, value in vars(RequestLimits()).items():
        if value is not None:
            assert f"| `limits.{name}` | {value:,} |" in page
