"""Structured outputs of masked models: always valid, and the same in any company."""

import json
from typing import Any

import jsonschema
import pytest
from vllm import RequestOutput, SamplingParams

from tests.engine.conftest import Engine, GetEngine, preemptions
from tests.engine.masked_requests import VOCABULARY, GetMade
from tests.engine.one_step import random_ids
from tests.engine.test_grammars import KINDS, check_person, of, text_of, xargs
from tests.unit.grammar.canvases import SCHEMAS

pytestmark = pytest.mark.numerics

FAMILIES = ("SDAR", "Nemotron", "Fast-dLLM", "LLaDA2.2")
PERSON = of(json=SCHEMAS["person"])
ROOM = {"blocks_in_flight": 2}  # for verified drafts


def generate(model: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    """Prompts that end at every place in a block."""
    prompts = [random_ids(5 + i, VOCABULARY, i) for i in range(len(params))]
    return model.ask(prompts, params)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0},
    "few steps": xargs(max_steps=2),
    "at once": xargs(max_steps=1),
    "sure of little": xargs(accept_probability=0.05),
    "most probable ones": xargs(acceptance="top_k", accept_tokens=3),
    "in order": xargs(acceptance="in_order", max_steps=3),
    "by entropy": xargs(acceptance="entropy_bound", entropy_bound=4.0),
    "edited": xargs(edit_probability=0.01),
    "truncated": {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 2.0},
    "excluded": {"bad_words": ["ge", "er", "1"]},
    "log-probabilities": {"logprobs": 2},
    "goes on": {"ignore_eos": True, "max_tokens": 70},
}


@pytest.mark.parametrize(
    ("family", "block_length", "settings"),
    [
        ("SDAR", 4, {}),
        ("Nemotron", 32, {}),
        ("Fast-dLLM", 32, {}),
        ("LLaDA2.2", 4, {}),
        pytest.param("SDAR", 4, ROOM, marks=pytest.mark.thorough),
        pytest.param("SDAR", 32, ROOM, marks=pytest.mark.thorough),
        pytest.param("Fast-dLLM", 4, {}, marks=pytest.mark.thorough),
    ],
)
def test_answers_are_valid(
    engine: GetEngine, made: GetMade, family: str, block_length: int, settings: dict[str, int]
) -> None:
    model = engine(made(family, block_length).checkpoint, settings, block_size=32)
    verifies = family == "Fast-dLLM" or settings == ROOM
    own = {"verified": xargs(acceptance="verified")} if verifies else {}
    all_settings = SETTINGS | own
    beside = [
        SamplingParams(**{"max_tokens": 60, "seed": i, "structured_outputs": PERSON, **settings})
        for i, settings in enumerate(all_settings.values())
    ]
    for name, output in zip(all_settings, generate(model, beside), strict=True):
        check_person(model, all_settings[name], output)
        tokens = output.outputs[0].token_ids
        assert max(tokens) < VOCABULARY, "neither masks nor tokens that delete or insert"
    kinds = [
        SamplingParams(max_tokens=50 + i, seed=i, structured_outputs=wanted)
        for i, (wanted, _) in enumerate(KINDS.values())
    ]
    for (_, check), output in zip(KINDS.values(), generate(model, kinds), strict=True):
        check(text_of(model, output))
    schemas = [
        SamplingParams(max_tokens=100 + i, seed=i, structured_outputs=of(json=schema))
        for i, schema in enumerate(SCHEMAS.values())
    ]
    for schema, output in zip(SCHEMAS.values(), generate(model, schemas), strict=True):
        jsonschema.validate(json.loads(text_of(model, output)), schema)


# --- the same in any company --------------------------------------------------------------------

MIX: list[dict[str, Any]] = [
    {"structured_outputs": of(json=SCHEMAS["order"])},
    {},
    {"structured_outputs": of(json=SCHEMAS["list of people"]), "top_k": 9},
    {"structured_outputs": of(regex="([a-z]+ ){12}end"), "bad_words": ["ab", "the"]},
    {"logprobs": 1, "ignore_eos": True},
    {"structured_outputs": of(json_object=True), "presence_penalty": 1.0},
    {"structured_outputs": of(regex="[a-z]{70}"), "temperature": 0.0},
]
COMPANY: dict[str, dict[str, Any]] = {
    "together": {},
    "preempted": {"num_gpu_blocks_override": 8, "block_size": 32, "max_model_len": 160},
    "chunked": {"max_num_batched_tokens": 40},
    "asynchronous": {"async_scheduling": True},
}


def mixed_params(family: str) -> list[SamplingParams]:
    """Of Nemotron in its other modes, too; of SDAR and Fast-dLLM v2 with verified drafts, too."""
    ways = [xargs(accept_probability=0.3)]
    if family == "Nemotron":
        ways += [xargs(mode="self_speculation"), xargs(mode="autoregressive")]
    elif family != "LLaDA2.2":
        ways.append(xargs(acceptance="verified"))
    return [
        SamplingParams(**{"max_tokens": 70, "seed": i, **kind}, **ways[i % len(ways)])
        for i, kind in enumerate(MIX)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_in_any_company(engine: GetEngine, made: GetMade, family: str, asynchronous: None) -> None:
    length, settings = (8, ROOM) if family == "SDAR" else (32, {})
    path, params = made(family, length).checkpoint, mixed_params(family)
    model = engine(path, settings, block_size=32, max_num_seqs=1, async_scheduling=False)
    alone = [list(output.outputs[0].token_ids) for output in generate(model, params)]
    for name, options in COMPANY.items():
        options = {"async_scheduling": False, "block_size": 32, **options}
        model = engine(path, settings, disable_log_stats=False, **options)
        found = [list(output.outputs[0].token_ids) for output in generate(model, params)]
        assert found == alone, name
        if name == "preempted":
            assert preemptions(model) > 0
