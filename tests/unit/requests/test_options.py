"""What a request's options become before a model sees them, what a server may set of them,
predicted outputs, and stops that the device foresees."""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.utils import check_stop

from vllm_dllm.config.architectures import FAMILIES, LLADA22
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.ends import MAX_FORESEEN_STOPS, NEVER, foreseen_stop_tokens, is_last_block
from vllm_dllm.requests.options import (
    OPTIONS_KEY,
    RequestOptions,
    load_option,
    load_options,
    server_defaults,
)
from vllm_dllm.requests.prediction import (
    AcceptedTokenCounter,
    encode_prediction,
    make_accepted_token_counter,
    move_openai_prediction,
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
        (ours(self_conditioning_tolerance=0.1, self_conditioning_top_k=9), "exclude each other"),
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


def moved(**body: Any) -> Any:
    move_openai_prediction(body)
    return body.get("vllm_xargs")


def test_openais_prediction() -> None:
    for content in ("AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]):
        prediction, own = {"type": "content", "content": content}, {"diffusion_max_steps": 2}
        assert moved(prediction=prediction, vllm_xargs=own) == {**own, "diffusion_prediction": "AB"}
    assert moved() is moved(prediction=None) is None
    # Keys of another type are vLLM's to refuse.
    assert moved(prediction=prediction, vllm_xargs=[1]) == [1]


OTHER_FORMS: list[Any] = [
    "AB",
    {"type": "text", "content": "A"},
    {"type": "content"},
    {"type": "content", "content": 5},
    {"type": "content", "content": [{"type": "image_url"}]},
    {"type": "content", "content": ["A"]},
]


@pytest.mark.parametrize("prediction", OTHER_FORMS, ids=repr)
def test_another_form(prediction: Any) -> None:
    with pytest.raises(VLLMValidationError, match="prediction must be "):
        moved(prediction=prediction)


def test_both_names_at_once() -> None:
    prediction, own = {"type": "content", "content": "A"}, {"diffusion_prediction": "B"}
    with pytest.raises(VLLMValidationError, match="Leave one out"):
        moved(prediction=prediction, vllm_xargs=own)


TOKENIZER = Mock(encode=lambda text, add_special_tokens: [ord(c) for c in text])


def common(first: list[int], second: list[int]) -> int:
    """The length of a longest common subsequence, by the textbook's table."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else longer
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(50))
def test_as_the_textbook_counts(seed: int) -> None:
    draw = random.Random(seed)
    predicted, answer = ([draw.randrange(6) for _ in range(draw.randrange(90))] for _ in range(2))
    counter = AcceptedTokenCounter(predicted)
    while_growing = []
    for begin in range(0, max(len(answer), 1), 7):
        counter.add_tokens("first", answer[begin : begin + 7])
        while_growing.append(counter.counts()["accepted_prediction_tokens"])
        assert while_growing[-1] == common(predicted, answer[: begin + 7])
    assert counter.counts() == {
        "accepted_prediction_tokens": while_growing[-1],
        "rejected_prediction_tokens": len(predicted) - while_growing[-1],
    }


def test_all_answers_count() -> None:
    counter = AcceptedTokenCounter([1, 2, 3])
    counter.add_tokens((0, 0), [1, 9, 3])
    counter.add_tokens((0, 1), [])
    assert counter.counts() == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}


def test_a_text_is_read_once() -> None:
    """Each prompt of a request, and the count of all, has the same."""
    encode = Mock(side_effect=lambda text, add_special_tokens: [*text.encode()])
    tokenizer = Mock(encode=encode)
    tokens = [encode_prediction("read once", tokenizer) for _ in range(64)]
    assert encode.call_count == 1 and tokens == [[*b"read once"]] * 64


def test_of_a_request() -> None:
    for prediction in ("AB", [65, 66]):
        params = SamplingParams(extra_args={"diffusion_prediction": prediction})
        counter = make_accepted_token_counter(params, TOKENIZER)
        assert counter is not None
        counter.add_tokens(0, [66])
        assert counter.counts()["accepted_prediction_tokens"] == 1
    assert make_accepted_token_counter(SamplingParams(), TOKENIZER) is None


VOCABULARY, WIDTH, MAX_MODEL_LEN = 12, 6, 40


def vllm_stops(prompt_len: int, generated: int, block: list[int], params: SamplingParams) -> bool:
    """Runs vLLM's own check after each token of the block, as its scheduler does."""
    request = SimpleNamespace(
        pooling_params=None,
        sampling_params=params,
        max_tokens=params.max_tokens,
        output_token_ids=[],
        num_output_tokens=generated,
        num_tokens=prompt_len + generated,
        status=None,
        stop_reason=None,
    )
    for token in block:
        request.output_token_ids.append(token)
        request.num_output_tokens += 1
        request.num_tokens += 1
        if check_stop(request, MAX_MODEL_LEN):
            return True
    return False


def test_agrees_with_the_scheduler() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    cases, expected = [], []
    for _ in range(300):
        params = SamplingParams(
            max_tokens=draw(1, 30), stop_token_ids=[draw(0, VOCABULARY) for _ in range(draw(0, 3))]
        )
        params._eos_token_id = draw(0, VOCABULARY) if draw(0, 2) else None
        prompt_len, generated, length = draw(1, 20), WIDTH * draw(0, 3), draw(1, WIDTH + 1)
        if generated >= params.max_tokens or prompt_len + generated + length > MAX_MODEL_LEN:
            continue  # such a request has stopped before
        block = torch.randint(VOCABULARY, (WIDTH,), generator=generator)
        end = min(prompt_len + params.max_tokens, MAX_MODEL_LEN)
        stops = foreseen_stop_tokens(params)
        stops += [NEVER] * (3 - len(stops))
        cases.append((block, length, prompt_len + generated + length, end, stops))
        expected.append(vllm_stops(prompt_len, generated, block[:length].tolist(), params))
    blocks, lengths, block_ends, ends, stops = zip(*cases, strict=True)
    found = is_last_block(
        torch.stack(blocks),
        torch.arange(WIDTH) < torch.tensor(lengths)[:, None],
        torch.tensor(block_ends),
        torch.tensor(ends),
        torch.tensor(stops),
    )
    assert found.tolist() == expected
    assert 50 < sum(expected) < len(expected) - 50


@pytest.mark.parametrize("count", [MAX_FORESEEN_STOPS, MAX_FORESEEN_STOPS + 1])
def test_a_request_with_too_many_stop_tokens_is_not_foreseen_to_stop(count: int) -> None:
    tokens = foreseen_stop_tokens(SamplingParams(stop_token_ids=list(range(count))))
    assert tokens == (list(range(count)) if count <= MAX_FORESEEN_STOPS else [])
