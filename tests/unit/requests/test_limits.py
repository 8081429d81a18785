"""What one request may ask of a server: every key with every wrong type, the last that is served,
the first that is refused, and numbers and lists that would end an engine or defeat a rule."""

from contextlib import nullcontext
from typing import Any

import pytest
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams

from tests.unit.requests.served_model import NEMOTRON, C, admitted, options, refusal, served
from vllm_dllm.compat.admission import MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS
from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.http import check_request_body
from vllm_dllm.requests.limits import (
    check_allowed_tokens,
    check_first_token,
    check_numbers,
    check_repetition_detection,
    check_request_limits,
    check_sampler_limits,
    check_token_limits,
)
from vllm_dllm.requests.options import KEYS, OPTIONS_KEY, RequestOptions

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 2**31 - 1}, "max_tokens must be at most 1073741824, got 2147483647"),
        ({"repetition_penalty": 1e-320}, "from 1e-06 to 1e.06, got 1e-320"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be from .* got 1e.300"),
        (
            {"seed": 2**63},
            "seed must be from -9223372036854775808 to 9223372036854775807 for n = 1",
        ),
        ({"seed": 2**63 - 1, "n": 2}, "to 9223372036854775806 for n = 2, got 9223372036854775807"),
        ({"seed": -(2**63) - 1}, "got -9223372036854775809"),
        ({"top_k": 2**63}, "top_k must be from -9223372036854775808 to .* got 9223372036854775808"),
        ({"logit_bias": {3: float("inf")}}, "got inf for token 3. Use allowed_token_ids"),
        ({"logit_bias": {3: float("nan")}}, "got nan for token 3"),
    ],
)
def test_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        check_numbers(SamplingParams(**options))


def test_numbers_that_are_admitted() -> None:
    check_numbers(SamplingParams(max_tokens=None))
    check_numbers(SamplingParams(max_tokens=2**30))
    check_numbers(SamplingParams(seed=2**63 - 2, n=2))
    check_numbers(SamplingParams(seed=-(2**63), top_k=2**63 - 1))
    check_numbers(SamplingParams(repetition_penalty=1e-6, logit_bias={3: -100.0}))


@pytest.mark.parametrize(
    ("size", "count", "is_served"),
    [
        *[(size, count, True) for size, count in ((20, 4), (256, 2), (0, 0), (1, 512))],
        *[(size, count, False) for size, count in ((257, 2), (2, 257), (10**9, 2), (0, 2**64))],
    ],
)
def test_repetitions_that_are_looked_for(size: int, count: int, is_served: bool) -> None:
    """The engine looks for each size after each token."""
    wanted = RepetitionDetectionParams(max_pattern_size=size, min_count=count)
    complaint = pytest.raises(VLLMValidationError, match=f"repetition_detection .* times {count}")
    with nullcontext() if is_served else complaint:
        check_repetition_detection(SamplingParams(repetition_detection=wanted))


def of_lists(allowed: int = 1, stops: int = 0, bad: int = 0, min_tokens: int = 1) -> None:
    params = SamplingParams(
        allowed_token_ids=[7] * allowed,
        stop_token_ids=list(range(stops)),
        min_tokens=min_tokens,
        max_tokens=9,
    )
    params._bad_words_token_ids = [[1, 2]] * bad
    check_sampler_limits(params)


def test_lists() -> None:
    of_lists(MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS // 2)
    of_lists(stops=MAX_STOP_TOKENS + 1, min_tokens=0)  # the sampler does not see them
    for lists, message in (
        ({"allowed": MAX_ALLOWED_TOKENS + 1}, "allowed_token_ids must have at most 1024 tokens"),
        ({"stops": MAX_STOP_TOKENS + 1}, "got 129. Name fewer, or leave out min_tokens"),
        ({"bad": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS}, "bad_words must have at most 1024 tokens"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            of_lists(**lists)


@pytest.mark.parametrize("key", ["allowed_token_ids", "logprob_token_ids"])
def test_a_request_that_leaves_no_token_to_choose(key: str) -> None:
    def check(tokens: list[int], bad: list[list[int]] = [], **options: Any) -> None:  # noqa: B006
        params = SamplingParams(**{key: tokens}, **options)
        params.update_from_generation_config({}, eos_token_id=1)
        params._bad_words_token_ids = bad
        check_allowed_tokens(params, is_constrained=key == "logprob_token_ids")

    check([1])
    check([1, 2], min_tokens=5)
    check([1, 2], [[2, 1]], min_tokens=5)
    check([1, 2], [[2]])
    with pytest.raises(VLLMValidationError, match=f"{key} must leave .* min_tokens = 5"):
        check([1], min_tokens=5)
    with pytest.raises(VLLMValidationError, match=f"{key} must leave a token that bad_words do"):
        check([2], [[2]], bad_words=["x"])
    with pytest.raises(VLLMValidationError, match="that bad_words and min_tokens do not exclude"):
        check([1, 2], [[2]], bad_words=["x"], min_tokens=1)


def test_a_request_whose_vocabulary_is_all_excluded() -> None:
    """`min_tokens` excludes what ends an answer."""

    def check(stops: range, bad: range = range(0), min_tokens: int = 1) -> None:
        params = SamplingParams(stop_token_ids=list(stops), min_tokens=min_tokens)
        params.update_from_generation_config({}, eos_token_id=1)
        params._bad_words_token_ids = [[token] for token in bad]
        check_first_token(params, vocab_size=8)

    check(range(7))
    check(range(8), min_tokens=0)
    for stops, bad in ((range(8), range(0)), (range(5), range(5, 8)), (range(0), range(8))):
        with pytest.raises(VLLMValidationError, match=r"min_tokens = 1, .* got all 8 of the"):
            check(stops, bad)


VALUES: dict[str, Any] = {
    "an integer": 5,
    "no integer": 5.5,
    "a float of an integer": 5.0,
    "negative": -1,
    "huge": 2**62,
    "tiny": 1e-60,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "true": True,
    "a text": "x",
    "no text": "",
    "a number as text": "5",
    "an object": {"type": "content"},
    "a list": [1],
    "a list of negatives": [-1],
    "a list of large ones": [10**6],
    "a list of booleans": [True],
    "a list of texts": ["a"],
    "a list of floats": [1.0],
    "lists": [[1]],
}
INTEGERS = {"an integer"}
NUMBERS = INTEGERS | {"no integer", "a float of an integer"}
LISTS = {"a list"}
TAKES: dict[str, set[str]] = {
    "max_steps": INTEGERS,
    "canvas_length": INTEGERS,
    "seed_canvas": LISTS,
    "prediction": LISTS | {"a text", "no text", "a number as text"},
    "pinned": LISTS,
    "read_only": {"true"},
    "constrained": {"true"},
    "window_rule": set(),
    "t_min": NUMBERS,
    "t_max": NUMBERS,
    "acceptance": set(),
    "entropy_bound": NUMBERS | {"tiny"},
    "accept_probability": {"tiny"},
    "accept_tokens": INTEGERS,
    "edit_probability": {"tiny"},
    "edit_steps": INTEGERS,
    "blocks_in_flight": INTEGERS,
    "mode": set(),
    "confidence_threshold": NUMBERS | {"tiny"},
    "stability_threshold": INTEGERS,
    "judge_answer_only": {"true"},
    "load_stages": INTEGERS,
    "logprobs": set(),
    "stream_canvases": set(),
}
NEEDS = {  # what goes with a value that is right
    "t_min": {"diffusion_t_max": 6.0},
    "t_max": {"diffusion_t_min": 0.5},
    "seed_canvas": {"diffusion_canvas_length": 1},
    "pinned": {"diffusion_seed_canvas": [7] * C},
}
ANY = RequestLimits(canvas_length=1)


def test_every_key_is_in_the_table() -> None:
    assert [f"diffusion_{name}" for name in TAKES] == list(KEYS)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", TAKES)
def test_a_key_takes_its_type_alone_and_is_named_otherwise(name: str, value: str) -> None:
    key = f"diffusion_{name}"
    family = None if KEYS[key].uniform else NEMOTRON
    given = {**NEEDS.get(name, {}), key: VALUES[value]}
    to = served(family=family, limits=ANY)
    if value in TAKES[name]:
        assert options(given, to, logprob_token_ids=[3])
        return
    error = refusal(given, to, logprob_token_ids=[3])
    assert str(error).startswith(f"{key} "), error
    assert len(str(error)) < 300 and "\n" not in str(error)
    assert error.parameter == key


@pytest.mark.parametrize("value", ["true", "an object", "a list of booleans", "lists"])
@pytest.mark.parametrize("name", TAKES)
def test_a_body_is_told_before_vllm_makes_something_else_of_it(name: str, value: str) -> None:
    """vLLM's reader takes `true` for 1, also in a list."""
    key = f"diffusion_{name}"
    body = {"vllm_xargs": {**NEEDS.get(name, {}), key: VALUES[value]}}
    if value in TAKES[name] or (name, value) == ("stream_canvases", "true"):
        check_request_body(body, parses_tool_calls=False, forces_tool_calls=False)
        return
    with pytest.raises(VLLMValidationError, match=f"^{key} must be") as refused:
        check_request_body(body, parses_tool_calls=False, forces_tool_calls=False)
    assert refused.value.parameter == key


NAMES = {
    "max_steps": "Did you mean diffusion_max_steps?",
    "max_denoising_steps": "Did you mean diffusion_max_steps?",
    "Diffusion_max_steps": "Did you mean diffusion_max_steps?",
    "diffusion_max_stepz": "Did you mean diffusion_max_steps?",
    "diffusion-max-steps": "Did you mean diffusion_max_steps?",
    "diffusion_entropy_bond": "Did you mean diffusion_entropy_bound?",
    "window": "Did you mean diffusion_window_rule?",
    "diffusionMaxSteps": "Did you mean diffusion_max_steps?",
    "maxSteps": "Did you mean diffusion_max_steps?",
    " diffusion_max_steps": "Did you mean diffusion_max_steps?",
    "max steps": "Did you mean diffusion_max_steps?",
    "": "Known are: diffusion_accept_probability, ",
    "foo": "Known are: diffusion_accept_probability, ",
    "temperature": "Known are: diffusion_accept_probability, ",
    "diffusion_joins_commits": "is not known",  # the scheduler's to say
    OPTIONS_KEY: "is not known",
}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_misspelt_is_ignored(name: str) -> None:
    error = refusal({name: 1})
    shown = name if name.split() == [name] else f"'{name}'"
    assert str(error).startswith(f"{shown} is not known. ") and NAMES[name] in str(error)
    assert error.parameter == name


def test_keys_that_are_no_text_are_refused() -> None:
    """JSON has none, but Python's dictionaries do."""
    given: dict[Any, Any] = {7: 1}
    assert str(refusal(given)).startswith("7 is not known. Known are: ")


def test_what_vllm_reads_is_left_alone() -> None:
    theirs = {"kv_transfer_params": {"do_remote_prefill": False}, "session_id": "a"}
    own = admitted(SamplingParams(extra_args=theirs)).extra_args or {}
    assert {key: own[key] for key in theirs} == theirs
