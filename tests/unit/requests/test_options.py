"""What a request's options become before a model sees them, and what a server may set of them."""

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_dllm.config.architectures import FAMILIES, LLADA22
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.options import (
    OPTIONS_KEY,
    RequestOptions,
    fits_canvases,
    is_read_only,
    load_options,
    server_defaults,
)


def width(max_tokens: int | None, **extra: Any) -> int | None:
    changes = RequestOptions(**extra).narrowing(max_tokens, canvas_length=256)
    return changes.get("canvas_length", extra.get("canvas_length"))


def test_a_canvas_is_no_wider_than_the_tokens_it_is_for() -> None:
    assert (width(1), width(16), width(17), width(20)) == (16, 16, 32, 32)
    assert width(240) == 240
    assert (width(241), width(256), width(1000), width(None)) == (None,) * 4


def test_a_canvas_that_is_given_keeps_its_width() -> None:
    assert width(20, canvas_length=200) == 200
    assert width(20, seed_canvas=[1] * 256) is None
    assert width(20, read_only=1) is None
    assert width(20, max_steps=3) == 32


def test_later_canvases_are_fitted_unless_the_request_says_how_wide_they_are() -> None:
    def fits(**extra: Any) -> bool:
        return RequestOptions(**extra).narrowing(257, canvas_length=256).get("fits_canvases", False)

    assert fits() and fits(max_steps=3)
    assert not fits(canvas_length=256)
    assert not fits(seed_canvas=[1] * 256)
    assert not fits(read_only=1)


def test_what_is_carried_is_read_again() -> None:
    params = SamplingParams(extra_args={"theirs": 1, "diffusion_t_min": 0.5})
    options = RequestOptions(
        read_only=True,
        canvas_length=16,
        fits_canvases=True,
        reasoning=(*(frozenset({3}),) * 3, True),
    )
    assert load_options(params) is None and not is_read_only(params)
    options.store_in(params)
    assert load_options(params) == options and is_read_only(params) and fits_canvases(params)
    # vLLM's schedulers look at the width.
    assert params.extra_args is not None
    assert params.extra_args.keys() == {"theirs", "diffusion_canvas_length", OPTIONS_KEY}
    assert params.extra_args["diffusion_canvas_length"] == 16


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"diffusion_acceptance": "luck"}, "must be one of"),
        ({"acceptance": "top_k"}, "acceptance is not known. Did you mean diffusion_acceptance?"),
        ({"diffusion_seed_canvas": [1]}, "diffusion_seed_canvas is not known"),
        ({"diffusion_stream_canvases": True}, "diffusion_stream_canvases is not known"),
        ({"diffusion_max_steps": 0}, "diffusion_max_steps must be an integer >= 1 and"),
        ({"diffusion_acceptance": "in_order"}, "'in_order' is not for this model"),
        ({"diffusion_t_min": 0.4}, "come together"),
    ],
)
def test_unusable_defaults(defaults: dict[str, Any], message: str) -> None:
    config = ExtensionConfig.from_additional_config({"vllm_dllm": {"defaults": defaults}})
    with pytest.raises(ValueError, match=message):
        server_defaults(config.defaults, None)


def test_defaults_of_masked_models() -> None:
    family = FAMILIES["SDARForCausalLM"]
    assert server_defaults({"diffusion_acceptance": "top_k"}, family) == {
        "acceptance": "top_k",
        "accept_probability": 0.85,
        "entropy_bound": 0.35,
        "edit_probability": None,
    }
    assert server_defaults({}, LLADA22) == {
        "acceptance": "confidence",
        "accept_probability": 0.5,
        "entropy_bound": 0.35,
        "edit_probability": 0.0,
    }
    with pytest.raises(ValueError, match="diffusion_t_min is not for masked"):
        server_defaults({"diffusion_t_min": 0.4, "diffusion_t_max": 0.5}, family)


def test_a_default_of_null_is_none() -> None:
    assert server_defaults({"diffusion_acceptance": None}, None) == {}


def test_a_predicted_answer_is_judged_alone() -> None:
    assert RequestOptions(prediction=[5, 6]).judges_answer_only
    assert not RequestOptions().judges_answer_only
    assert not RequestOptions(prediction=[5, 6], judge_answer_only=False).judges_answer_only
    assert RequestOptions(judge_answer_only=True).judges_answer_only


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"window_rule": "symmetric"}, "window_rule in --additional-config belongs under vllm_dll"),
        ({"vllm_dlm": {}}, "vllm_dlm in --additional-config is not known. Did you mean vllm_dllm?"),
        ({"Vllm-Dllm": {}}, "Did you mean vllm_dllm?"),
        ({"windowrule": 1}, "Did you mean window_rule?"),
        ({"vllm_dllm": {"window_rul": 1}}, "window_rul is not known. Did you mean window_rule?"),
        ({"vllm_dllm": []}, "settings must be an object with the keys .* got "),
    ],
)
def test_nothing_misspelt_is_ignored(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as refusal:
        ExtensionConfig.from_additional_config(config)
    assert "\n" not in str(refusal.value)


def test_settings_of_others_are_left_alone() -> None:
    others = {"torchair_graph_config": {"enabled": True}, "expert_map_path": "here"}
    assert ExtensionConfig.from_additional_config(others) == ExtensionConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit_canvas": 1}, "fit_canvas must be true or false, got 1"),
        ({"defaults": "confidence"}, "defaults must be an object, got 'confidence'"),
        ({"sampling_memory_mib": 0}, "sampling_memory_mib must be an integer >= 1 .*, got 0"),
        ({"self_conditioning_tolerance": 1.0}, r"must be a number >= 0 and < 1, got 1.0"),
        ({"self_conditioning_tolerance": "0"}, r"must be a number >= 0 and < 1, got '0'"),
        ({"self_conditioning_top_k": True}, "top_k must be an integer >= 1 .*, got True"),
        ({"self_conditioning_tolerance": 0.1, "self_conditioning_top_k": 9}, "exclude each other"),
    ],
)
def test_settings_of_the_sampler_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExtensionConfig.from_additional_config({"vllm_dllm": settings})
