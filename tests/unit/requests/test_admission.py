"""The way of a request into the engine: what it asks for is refused, or becomes its options."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

from tests.unit.requests.served_model import (
    NEMOTRON,
    SDAR,
    C,
    OfCharacters,
    V,
    admitted,
    options,
    refusal,
    served,
)
from vllm_dllm.config.architectures import FAMILIES, LLADA22
from vllm_dllm.config.canvas_feeds import FEED
from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests import admission
from vllm_dllm.requests.admission import admit, admit_target
from vllm_dllm.requests.limits import begin_http_request
from vllm_dllm.requests.options import KEYS, OPTIONS_KEY, RequestOptions, load_option, load_options

CANVAS = [7] * C
REPETITIONS = RepetitionDetectionParams(max_pattern_size=10**6, min_count=2)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a wider canvas": ({"canvas_length": C + 1}, "at most 64, the served canvas, got 65"),
    "a short seed": ({"seed_canvas": [1, 2]}, "must be 64 token ids from 0 to 511, .* got 2"),
    "a seed out of the vocabulary": ({"seed_canvas": [V] * C}, r"got \[512, 512, .* in it"),
    "pins alone": ({"pinned": [0]}, "needs a diffusion_seed_canvas"),
    "a pin outside": ({"seed_canvas": CANVAS, "pinned": [C]}, r"from 0 to 63, got \[64\]"),
    "no choices": ({"constrained": 1}, "needs logprob_token_ids"),
    "watching": ({"stream_canvases": 1}, "is for streams of .* VLLM_PLUGINS=vllm_dllm_canvas"),
    "a prediction out of the vocabulary": ({"prediction": [3, V]}, r"got \[512\] in it"),
    "two first canvases": ({"seed_canvas": CANVAS, "prediction": "a"}, "both say what the first"),
    "half a schedule": ({"t_max": 0.5}, "come together, got None and 0.5"),
    "upside down": ({"t_min": 0.9, "t_max": 0.5}, "at most diffusion_t_max, got 0.9 and 0.5"),
    "in order": ({"acceptance": "in_order"}, "'in_order' is not for this model. Choose entropy_bo"),
    "edits": ({"edit_probability": 0.5}, "is for masked models, got 0.5. Leave it out"),
    "unmasking": ({"logprobs": "unmask"}, "is for masked models, got 'unmask'. Leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_has_not_is_refused(case: str) -> None:
    given, message = REFUSED[case]
    error = refusal({f"diffusion_{name}": value for name, value in given.items()})
    with pytest.raises(VLLMValidationError, match=message):
        raise error
    assert error.parameter in KEYS


@pytest.mark.parametrize("key", [key for key, mark in KEYS.items() if not mark.masked])
def test_masked_models_have_some_of_the_keys(key: str) -> None:
    error = refusal({key: 1}, served(family=SDAR))
    assert "is not for masked models, got 1. Leave it out; they take" in str(error)


@pytest.mark.parametrize(
    "asked",
    [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[7]]}],
    ids=lambda asked: next(iter(asked)),
)
def test_a_prompt_that_sees_itself_has_no_log_probabilities(asked: dict[str, Any]) -> None:
    (name,) = asked
    error = refusal({}, served(family=SDAR), **asked)
    assert str(error).startswith(f"{name} is not possible with a masked model")
    assert error.parameter == name
    assert options({}, served(family=NEMOTRON), prompt_logprobs=1), "whose prompts are causal"


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_words_need_a_tokenizer(name: str) -> None:
    """vLLM would ignore them."""
    error = refusal({}, served(tokenizer=None), **{name: ["a"]})
    assert str(error).startswith(f"{name} needs a tokenizer") and error.parameter == name


def test_a_thinking_budget_is_not_ignored_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(admission.logger, "warning_once", warnings.append)
    options({})
    assert warnings == []
    options({}, thinking_token_budget=5)
    assert warnings == ["thinking_token_budget is ignored by diffusion models."]


def test_when_log_probabilities_are_taken() -> None:
    given, to = {"diffusion_logprobs": "unmask"}, served(family=SDAR)
    assert options(given, to, logprobs=0).logprobs == "unmask"
    assert options({}, to, logprobs=0).logprobs is None
    assert "needs logprobs, " in str(refusal(given, to))
    assert "flat_logprobs" in str(refusal(given, to, logprobs=0, flat_logprobs=True))
    moving = served(family=LLADA22)
    assert "diffusion_logprobs is not for LLaDA2.2, " in str(refusal(given, moving, logprobs=0))
    assert "one of ['unmask'], got 'mask'" in str(
        refusal({"diffusion_logprobs": "mask"}, to, logprobs=0)
    )


def test_a_constrained_request_names_its_choices_once() -> None:
    given, ids = {"diffusion_constrained": 1}, [3, 4]
    assert options(given, logprob_token_ids=ids).constrained
    refused = refusal(given, logprob_token_ids=ids, allowed_token_ids=ids)
    assert "got allowed_token_ids as well. Leave one" in str(refused)


@pytest.mark.parametrize("token", [-1, V])
def test_tokens_of_a_prompt_outside_the_vocabulary(token: int) -> None:
    """vLLM checks them by the tokenizer's size, if there is a tokenizer."""

    def resolve(params: SamplingParams) -> Any:
        return SimpleNamespace(sampling_params=params, prompt_token_ids=[5, token, V - 1])

    with pytest.raises(VLLMValidationError, match=f"from 0 to {V - 1}, got {token}"):
        admit(SamplingParams(), served(), resolve)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_of_more_tokens_than_there_are(name: str) -> None:
    """`--max-logprobs` may allow them."""
    to = served(limits=None)
    for count in (None, -1, V):
        assert options({}, to, **{name: count})
    assert f"{name} must be at most {V}, " in str(refusal({}, to, **{name: V + 1}))


def test_modes() -> None:
    """Of Nemotron; keys of steps are for one of them."""
    to, key = served(family=NEMOTRON), "diffusion_mode"
    assert options({}, to).mode == "diffusion"
    assert options({key: "self_speculation"}, to).canvas_length is None
    assert options({key: "autoregressive"}, to).canvas_length == 1
    for family in (None, SDAR):
        assert refusal({key: "autoregressive"}, served(family=family)).parameter == key
    steps = {"diffusion_accept_probability": 0.5}
    message = "with diffusion_mode 'self_speculation'. Leave it out, or ask for diffusion_mode"
    assert message in str(refusal({key: "self_speculation", **steps}, to))
    to = served(family=NEMOTRON, defaults={key: "self_speculation", **steps})
    assert options({}, to).mode == "self_speculation", "a server may have defaults for each"
    assert message in str(refusal(steps, to))
    assert options({key: "diffusion", **steps}, to).accept_probability == 0.5


def test_a_text_needs_a_tokenizer() -> None:
    to = served(tokenizer=None)
    assert options({"diffusion_prediction": [65]}, to).prediction_tokens == [65]
    message = str(refusal({"diffusion_prediction": "AB"}, to))
    assert message.startswith("diffusion_prediction must be a list of token ids on this server")


def test_a_prediction_that_is_certainly_too_long_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = served(limits=RequestLimits(prediction=3))
    assert options({"diffusion_prediction": "ABC"}, to).prediction_tokens == [65, 66, 67]
    monkeypatch.setattr(OfCharacters, "encode", None)
    message = str(refusal({"diffusion_prediction": "ABCD"}, to))
    assert "at most 3 tokens on this server, got a text of 4 characters" in message


# --- what the engine reads ----------------------------------------------------------------------


def test_options_travel_with_the_parameters() -> None:
    given = {
        "diffusion_prediction": "AB",
        "diffusion_max_steps": 3,
        "diffusion_entropy_bound": None,
        "diffusion_window_rule": "symmetric",
        FEED: "a/b",
    }
    params = SamplingParams(extra_args=given)
    own = admitted(params, served(defaults={"diffusion_entropy_bound": 0.3}))
    found = load_options(own)
    assert found == RequestOptions(
        prediction=[65, 66],
        max_steps=3,
        entropy_bound=0.3,
        window_rule="symmetric",
        canvas_feed="a/b",
    )
    assert found.judges_answer_only
    assert params.extra_args == given  # the caller's own
    # What vLLM's schedulers read is there, and nothing twice.
    assert own.extra_args is not None and own.extra_args.keys() == {
        *("diffusion_max_steps", FEED, OPTIONS_KEY)
    }


def test_a_request_that_reads_has_one_canvas() -> None:
    params = SamplingParams(max_tokens=100, extra_args={"diffusion_read_only": True})
    own = admitted(params)
    assert (own.max_tokens, own.ignore_eos) == (C, True)
    assert (params.max_tokens, params.ignore_eos) == (100, False)
    narrow = {"diffusion_read_only": 1, "diffusion_canvas_length": 4}
    assert admitted(SamplingParams(max_tokens=None, extra_args=narrow)).max_tokens == 4
    with pytest.raises(VLLMValidationError, match="min_tokens must be at most 4, the canvas"):
        admitted(SamplingParams(max_tokens=9, min_tokens=5, extra_args=narrow))


def test_what_is_never_committed_is_not_stored() -> None:
    given = {"diffusion_read_only": 1}
    answers = {"offload_prompt_only": False}
    several = {"connectors": [{}, {"kv_connector_extra_config": answers}]}
    for extra, stores in (({}, False), (answers, True), (several, True)):
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        to = served(config=SimpleNamespace(kv_transfer_config=transfer))
        assert not options({}, to).read_only
        if stores:
            assert "diffusion_read_only is not possible on this" in str(refusal(given, to))
        else:
            assert options(given, to).read_only


def test_defaults_are_the_servers_unless_the_request_says_otherwise() -> None:
    to = served(defaults={"diffusion_acceptance": "confidence", "diffusion_max_steps": 8})
    assert (options({}, to).acceptance, options({}, to).max_steps) == ("confidence", 8)
    own = {"diffusion_acceptance": "top_k", "diffusion_max_steps": None}
    assert (options(own, to).acceptance, options(own, to).max_steps) == ("top_k", 8)
    masked = options({}, served(family=SDAR))
    assert (masked.acceptance, masked.accept_probability, masked.entropy_bound) == (
        *("confidence", 0.85, 0.35),
    )
    schedule = served(defaults={"diffusion_t_min": 0.2, "diffusion_t_max": 0.4})
    assert "come together" in str(refusal({"diffusion_t_min": 0.1}, schedule))


def test_the_prompts_of_an_http_request_are_counted_together() -> None:
    to = served(limits=RequestLimits(n=4, prompt_logprobs=60))
    for _ in range(3):  # each a request of its own
        admitted(SamplingParams(n=4, prompt_logprobs=1), to, prompt=30)
    begin_http_request()
    admitted(SamplingParams(n=2, prompt_logprobs=1), to, prompt=15)
    with pytest.raises(VLLMValidationError, match=r"at most 60 log-probabilities .* got 62"):
        admitted(SamplingParams(prompt_logprobs=1), to, prompt=16)
    with pytest.raises(VLLMValidationError, match=r"n must ask for at most 4 answers .* got 5"):
        admitted(SamplingParams(n=2), to)
    begin_http_request()
    one, other = (admitted(SamplingParams(n=2), to) for _ in range(2))
    begin_http_request(adds_up=False)
    third = [admitted(SamplingParams(n=4), to) for _ in range(2)]
    names = [load_option(params, "http_request") for params in (one, other, *third)]
    assert names[0] == names[1] != names[2] == names[3] and None not in names


def test_offline_nobody_waits_for_others() -> None:
    to = served(limits=None)
    long = {"repetition_detection": REPETITIONS}
    assert options({"diffusion_canvas_length": 1}, to, n=1000, **long).canvas_length == 1
    assert refusal({}, **long).parameter == "repetition_detection"
    request = SimpleNamespace(sampling_params=SamplingParams(**long), prompt_embeds=None)
    assert admit_target(SamplingParams(), V, lambda _: request, to_many=False) is request


def test_a_target_has_no_options() -> None:
    params = SamplingParams(extra_args={"theirs": 1})
    request = SimpleNamespace(sampling_params=params, prompt_embeds=None)
    assert admit_target(params, V, lambda params: request, to_many=True) is request
    assert params.extra_args == {"theirs": 1}
    for wrong in (
        {"repetition_penalty": 1e300},
        {"allowed_token_ids": [7] * 1025},
        {"logprobs": V + 1},
        {"repetition_detection": REPETITIONS},
    ):
        request = SimpleNamespace(sampling_params=SamplingParams(**wrong), prompt_embeds=None)
        with pytest.raises(VLLMValidationError):
            admit_target(params, V, lambda _, request=request: request, to_many=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e38, 20_000])
def test_embeddings_of_a_prompt_are_numbers(value: float) -> None:
    """A NaN in the KV cache would spoil answers of others."""
    params = SamplingParams()
    embeddings = torch.full((3, 4), 1e4, dtype=torch.bfloat16)
    request = SimpleNamespace(sampling_params=params, prompt_embeds=embeddings)
    assert admit_target(params, V, lambda params: request, to_many=True) is request
    embeddings[1, 2] = value
    with pytest.raises(VLLMValidationError, match=r"from -10000 to 10000, got") as error:
        admit_target(params, V, lambda params: request, to_many=True)
    assert error.value.parameter == "prompt_embeds"


def test_integers_in_a_target_s_schema_may_be_of_any_size() -> None:
    """The engine is sent the parameters, in messages whose integers have 64 bits."""
    wanted = StructuredOutputsParams(json={"type": "integer", "maximum": 10**30})
    params = SamplingParams(structured_outputs=wanted)
    request = SimpleNamespace(sampling_params=params, prompt_embeds=None)
    admit_target(params, V, lambda params: request, to_many=True)
    assert b"1" + b"0" * 30 in bytes(MsgpackEncoder().encode(request.sampling_params)[0])
    assert isinstance(wanted.json, dict)  # the user's own


FAST_DLLM = FAMILIES["Fast_dLLM_QwenForCausalLM"]


def test_verified_drafts() -> None:
    """They come with no other key about steps."""
    key = "diffusion_acceptance"
    for family in (None, NEMOTRON, LLADA22):
        assert "'verified' is not for this model. Choose" in str(
            refusal({key: "verified"}, served(family=family, blocks_in_flight=2))
        )
    for to in (served(family=FAST_DLLM), served(family=SDAR, blocks_in_flight=2)):
        for other in ("max_steps", "accept_probability", "edit_steps"):
            error = refusal({key: "verified", f"diffusion_{other}": 1}, to)
            assert str(error).startswith(f"diffusion_{other} is not for {key} 'verified'")
        assert options({key: "verified", "diffusion_logprobs": "unmask"}, to, logprobs=1)


def test_verified_drafts_of_own_positions_need_a_canvas_of_two_blocks() -> None:
    to = served(family=SDAR, blocks_in_flight=1)
    error = refusal({"diffusion_acceptance": "verified"}, to)
    assert "needs room for two blocks in a canvas, and this server has room for one" in str(error)
    assert error.parameter == "diffusion_acceptance"


def test_a_request_gets_no_more_blocks_in_flight_than_the_server_has() -> None:
    key = "diffusion_blocks_in_flight"
    assert options({key: 4}, served(family=SDAR, blocks_in_flight=4)).blocks_in_flight == 4
    for most in (1, 4):
        error = refusal({key: most + 1}, served(family=SDAR, blocks_in_flight=most))
        assert str(error).startswith(f"{key} must be at most {most}, ") and error.parameter == key
    assert str(refusal({key: 1})).startswith(f"{key} is for masked models, got 1.")
