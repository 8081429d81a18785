"""Every key of a request, with every wrong type, and keys that nobody knows."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.unit.requests.served_model import NEMOTRON, C, admitted, options, refusal, served
from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.http import check_request_body
from vllm_dllm.requests.options import KEYS, OPTIONS_KEY

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
