"""What a request's options become before a model sees them, and what a server may set of them."""

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_dllm.config.architectures import FAMILIES, LLADA22
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.options import (
    OPTIONS_KEY,
    RequestOptions,
    load_option,
    load_options,
    server_defaults,
)


@pytest.mark.parametrize(
    ("max_tokens", "width"),
    [(1, 16), (16, 16), (17, 32), (240, 240), (241, None), (256, None), (1000, None)],
)
def test_canvases_are_no_wider_than_the_tokens_they_are_for(
    max_tokens: int, width: int | None
) -> None:
    narrow = {} if width is None else {"canvas_length": width}
    found = RequestOptions(max_steps=3).narrowing(max_tokens, canvas_length=256)
    assert found == {**narrow, "fits_canvases": True}


def test_a_request_that_says_how_wide_a_canvas_is_keeps_its_width() -> None:
    for chosen in ({"canvas_length": 200}, {"seed_canvas": [1] * 256}, {"read_only": 1}):
        assert RequestOptions(**chosen).narrowing(20, canvas_length=256) == {}
    assert RequestOptions().narrowing(None, canvas_length=256) == {}


def test_what_is_carried_is_read_again() -> None:
    params = SamplingParams(extra_args={"theirs": 1, "diffusion_t_min": 0.5})
    options = RequestOptions(
        read_only=True,
        canvas_length=16,
        fits_canvases=True,
        reasoning=(*(frozenset({3}),) * 3, True),
    )
    assert load_options(params) is None and not load_option(params, "read_only")
    options.store_in(params)
    assert (
        load_options(params) == options
        and load_option(params, "read_only")
        and load_option(params, "fits_canvases")
    )
    # vLLM's schedulers look at the width.
    assert params.extra_args is not None
    assert params.extra_args.keys() == {"theirs", "diffusion_canvas_length", OPTIONS_KEY}
    assert params.extra_args["diffusion_canvas_length"] == 16


def ours(**settings: Any) -> dict[str, Any]:
    return {"vllm_dllm": settings}


def defaults(**keys: Any) -> dict[str, Any]:
    return ours(defaults={f"diffusion_{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (defaults(acceptance="luck"), "must be one of"),
        (
            defaults(seed_canvas=[1]),
            "seed_canvas under defaults of --additional-config is not known",
        ),
        (defaults(stream_canvases=True), "diffusion_stream_canvases under defaults of"),
        (defaults(max_steps=0), "diffusion_max_steps must be an integer >= 1 and"),
        (defaults(acceptance="in_order"), "'in_order' is not for this model"),
        (defaults(t_min=0.4), "come together"),
        (ours(defaults={"acceptance": "x"}), r"not known. Did you mean diffusion_acceptance\?"),
        (ours(defaults="confidence"), "defaults must be an object, got 'confidence'"),
        ({"window_rule": "symmetric"}, "window_rule in --additional-config belongs under vllm_dll"),
        ({"vllm_dlm": {}}, r"in --additional-config is not known. Did you mean vllm_dllm\?"),
        ({"Vllm-Dllm": {}}, r"Did you mean vllm_dllm\?"),
        ({"windowrule": 1}, r"Did you mean window_rule\?"),
        ({"vllm_dllm": []}, "^vllm_dllm in --additional-config must be an object with the keys"),
        ({"diffusion_max_steps": 2}, r'under defaults: .*"defaults": {"diffusion_max_steps": \.'),
        ({"diffusion_config": {}}, "has an option: --diffusion-config"),
        (ours(diffusion_config={}), "has an option: --diffusion-config"),
        ({"a": {"b": {"Window_Rule": 1}}}, r"belongs under vllm_dllm: .*\{\"window_rule\": "),
        ({"a": {"diffusion_t_min": 1}}, "belongs under defaults"),
        ({"additional_config": ours(fit_canvas=True)}, "vllm_dllm in .* belongs at its top"),
        ({"narrow_draft": True}, r"belongs under drafter: .*\{\"drafter\": \{\"narrow_draft\": "),
        (ours(width=3), "width in --additional-config belongs under drafter"),
        (ours(diffusion_max_steps=2), r'under defaults: .*"defaults": {"diffusion_max_steps": \.'),
        (ours(window_rul=1), r"window_rul is not known. Did you mean window_rule\?"),
        (ours(limits={"n": 0}), "limits.n must be an integer >= 1 and <= .*, got 0"),
        (ours(limits={"steps": 3}), "steps is not known. Known are: limits.bad_words, "),
        (ours(limits=[]), "limits must be an object"),
        (ours(fit_canvas=1), "fit_canvas must be true or false, got 1"),
        (ours(sampling_memory_mib=0), "sampling_memory_mib must be an integer >= 1 .*, got 0"),
        (ours(self_conditioning_tolerance=1.0), "must be a number >= 0 and < 1, got 1.0"),
        (ours(self_conditioning_tolerance="0"), "must be a number >= 0 and < 1, got '0'"),
        (ours(self_conditioning_top_k=True), "top_k must be an integer >= 1 .*, got True"),
        (
            ours(self_conditioning_tolerance=0.1, self_conditioning_top_k=9),
            "exclude each other",
        ),
    ],
)
def test_unusable_settings(config: dict[str, Any], message: str) -> None:
    """Nothing that is misspelt is ignored."""
    with pytest.raises(ValueError, match=message) as refusal:
        server_defaults(ExtensionConfig.from_additional_config(config).defaults, None)
    assert "\n" not in str(refusal.value)


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


def test_settings_of_others_are_left_alone() -> None:
    others = {
        "torchair_graph_config": {"enabled": True, "defaults": {"width": 3}, "drafter": {}},
        "expert_map_path": "here",
        "buffer": 3,
    }
    assert ExtensionConfig.from_additional_config(others) == ExtensionConfig()
