"""What a request's options become before a model sees them."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.keys import STREAM_CANVASES, check_options
from vllm_dllm.requests.masked import check_masked_request
from vllm_dllm.requests.options import (
    FITS_CANVASES,
    JOINS_COMMITS,
    RequestOptions,
    check_choices,
    check_request,
    fit_canvas,
    mark,
)


def width(max_tokens: int | None, **extra: Any) -> int | None:
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra or None)
    fit_canvas(params, canvas_length=256)
    assert (params.extra_args or {}).items() >= extra.items()
    return (params.extra_args or {}).get("diffusion_canvas_length")


def test_a_canvas_is_no_wider_than_the_tokens_it_is_for() -> None:
    assert (width(1), width(16), width(17), width(20)) == (16, 16, 32, 32)
    assert width(240) == 240
    assert (width(241), width(256), width(1000), width(None)) == (None,) * 4


def test_a_canvas_that_is_given_keeps_its_width() -> None:
    assert width(20, diffusion_canvas_length=200) == 200
    assert width(20, diffusion_seed_canvas=[1] * 256) is None
    assert width(20, diffusion_read_only=1) is None
    assert width(20, diffusion_max_steps=3) == 32


def test_later_canvases_are_fitted_unless_the_request_says_how_wide_they_are() -> None:
    def fits(**extra: Any) -> bool:
        params = SamplingParams(max_tokens=257, extra_args=extra or None)
        return fit_canvas(params, canvas_length=256)

    assert fits() and fits(diffusion_max_steps=3)
    assert not fits(diffusion_canvas_length=256)
    assert not fits(diffusion_seed_canvas=[1] * 256)
    assert not fits(diffusion_read_only=1)


def test_what_the_scheduler_says_is_not_the_requests_to_say() -> None:
    params = SamplingParams(extra_args={FITS_CANVASES: True, JOINS_COMMITS: True})
    mark(params, joins_commits=False, fits_canvases=False, is_counted=False)
    options = RequestOptions.from_sampling_params(params, {})
    assert not options.fits_canvases and not options.joins_commits


def test_defaults_are_the_servers_unless_the_request_says_otherwise() -> None:
    defaults = {"diffusion_acceptance": "confidence", "diffusion_entropy_bound": 0.3}
    params = SamplingParams(extra_args={"diffusion_entropy_bound": 0.7, "diffusion_t_min": None})
    options = RequestOptions.from_sampling_params(params, defaults)
    assert (options.acceptance, options.entropy_bound, options.t_min) == ("confidence", 0.7, None)
    assert RequestOptions.from_sampling_params(SamplingParams(), {}).acceptance == "entropy_bound"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"diffusion_acceptance": "luck"}, "must be one of"),
        ({"acceptance": "top_k"}, "acceptance is not known. Known are: diffusion_accept_prob"),
        ({"diffusion_seed_canvas": [1]}, "diffusion_seed_canvas is not known"),
    ],
)
def test_unusable_defaults(defaults: dict[str, Any], message: str) -> None:
    config = ExtensionConfig.from_additional_config({"vllm_dllm": {"defaults": defaults}})
    with pytest.raises(ValueError, match=message):
        check_options(config.defaults, known=frozenset())


def test_a_predicted_answer_is_judged_alone() -> None:
    """Unless its request, or the server, says otherwise."""

    def judges(own: dict[str, Any], defaults: dict[str, Any] | None = None) -> bool:
        params = SamplingParams(extra_args=own)
        return RequestOptions.from_sampling_params(params, defaults or {}).judge_answer_only

    predicted = {"diffusion_prediction": [5, 6]}
    assert judges(predicted) and not judges({}) and not judges({"diffusion_prediction": []})
    assert not judges(predicted | {"diffusion_judge_answer_only": 0})
    assert not judges(predicted, {"diffusion_judge_answer_only": 0})


def test_a_servers_step_cap() -> None:
    check_options({"diffusion_max_steps": 8}, known=frozenset())
    with pytest.raises(ValueError, match="diffusion_max_steps must be an integer from 1 to"):
        check_options({"diffusion_max_steps": 0}, known=frozenset())
    defaults = {"diffusion_max_steps": 8}
    assert RequestOptions.from_sampling_params(SamplingParams(), defaults).max_steps == 8
    own = SamplingParams(extra_args={"diffusion_max_steps": 3})
    assert RequestOptions.from_sampling_params(own, defaults).max_steps == 3


def test_settings_of_the_wrong_kind() -> None:
    with pytest.raises(ValueError, match="fit_canvas must be true or false, got 1"):
        ExtensionConfig(fit_canvas=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="defaults must be an object, got 'confidence'"):
        ExtensionConfig(defaults="confidence")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("diffusion_t_min", 1e-60),  # would make logits infinite
        ("diffusion_t_min", 10**400),
        ("diffusion_accept_tokens", 2**63),
        ("diffusion_stability_threshold", True),
        ("diffusion_entropy_bound", float("nan")),
        ("diffusion_judge_answer_only", 2),
    ],
)
def test_values_out_of_range(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} must be "):
        check_options({key: value})


def test_a_default_of_null_is_none() -> None:
    options = RequestOptions.from_sampling_params(SamplingParams(), {"diffusion_acceptance": None})
    assert options.acceptance == "entropy_bound"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_memory_mib": 0}, "sampling_memory_mib must be an integer >= 1 .*, got 0"),
        ({"self_conditioning_tolerance": 1.0}, r"must be a number in \[0, 1\), got 1.0"),
        ({"self_conditioning_tolerance": "0"}, r"must be a number in \[0, 1\), got '0'"),
        ({"self_conditioning_top_k": True}, "top_k must be an integer >= 1 .*, got True"),
        ({"self_conditioning_tolerance": 0.1, "self_conditioning_top_k": 9}, "exclude each other"),
    ],
)
def test_settings_of_the_sampler_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtensionConfig.from_additional_config({"vllm_dllm": settings})


@pytest.mark.parametrize("key", ["allowed_token_ids", "logprob_token_ids"])
def test_a_request_that_leaves_no_token_to_choose(key: str) -> None:
    def check(tokens: list[int], bad: list[list[int]] = [], **options: Any) -> None:  # noqa: B006
        extra = {"diffusion_constrained": 1} if key == "logprob_token_ids" else None
        params = SamplingParams(**{key: tokens}, extra_args=extra, **options)
        params.update_from_generation_config({}, eos_token_id=1)
        params._bad_words_token_ids = bad
        check_choices(params)

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


# --- canvases to watch ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, False, None])
def test_not_to_watch_is_no_wish(value: Any) -> None:
    params = SamplingParams(extra_args={STREAM_CANVASES: value})
    check_request(params, canvas_length=64, vocab_size=512)
    check_masked_request(params)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (True, "is for streams of /v1/completions and .* VLLM_PLUGINS=vllm_dllm,vllm_dllm_canvas"),
        ("yes", r"must be a boolean \(or 0/1\), got 'yes'"),
    ],
)
def test_an_engine_that_nobody_watches_says_so(value: Any, complaint: str) -> None:
    """Offline, and where the plugin is not loaded."""
    params = SamplingParams(extra_args={STREAM_CANVASES: value})
    with pytest.raises(VLLMValidationError, match=complaint):
        check_request(params, canvas_length=64, vocab_size=512)


def test_a_server_cannot_watch_by_default() -> None:
    with pytest.raises(ValueError, match="is not known"):
        check_options({STREAM_CANVASES: True}, known=frozenset())
