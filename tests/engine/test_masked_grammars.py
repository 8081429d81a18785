"""Structured outputs of masked models: always valid, and the same in any company."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.conftest import Engine, preemptions
from tests.engine.masked import make_checkpoint
from tests.engine.one_step import random_ids
from tests.engine.test_grammars import KINDS, is_person, of
from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import SCHEMAS

pytestmark = pytest.mark.numerics

VOCABULARY, EOS = 512, 1
FAMILIES = {
    "SDAR": "SDARForCausalLM",
    "Nemotron": "NemotronLabsDiffusionModel",
    "Fast-dLLM v2": "Fast_dLLM_QwenForCausalLM",
    "LLaDA2.2": "LLaDA2.2",
}
PERSON = of(json=SCHEMAS["person"])
GetCheckpoint = Callable[..., Path]
GetEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GetCheckpoint:
    @cache
    def make(family: str, block_length: int) -> Path:
        path = tmp_path_factory.mktemp("masked")
        return make_checkpoint(path, block_length, FAMILIES[family])[0]

    return make


def xargs(**options: Any) -> dict[str, Any]:
    return {"extra_args": {f"diffusion_{name}": value for name, value in options.items()}}


def generate(model: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    """Prompts that end at every place in a block."""
    prompts = [{"prompt_token_ids": random_ids(5 + i, VOCABULARY, i)} for i in range(len(params))]
    return model.llm.generate(prompts, params, use_tqdm=False)


def text_of(model: Engine, output: RequestOutput) -> str:
    """What comes before the token that ends it. Not `text`, which begins with the prompt where that
    ends amid a character."""
    answer = output.outputs[0]
    assert answer.finish_reason in ("stop", "length")
    tokens = list(answer.token_ids)
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return model.llm.get_tokenizer().decode(tokens[:end])


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
    ("family", "block_length"),
    [
        ("SDAR", 4),
        ("Nemotron", 32),
        ("Fast-dLLM v2", 32),
        ("LLaDA2.2", 4),
        pytest.param("SDAR", 32, marks=pytest.mark.thorough),
        pytest.param("Fast-dLLM v2", 4, marks=pytest.mark.thorough),
    ],
)
def test_answers_are_valid(
    engine: GetEngine, checkpoint: GetCheckpoint, family: str, block_length: int
) -> None:
    """Of random weights, beside every parameter, in every form."""
    model = engine(checkpoint(family, block_length), block_size=32)
    beside = [
        SamplingParams(**{"max_tokens": 60, "seed": i, "structured_outputs": PERSON, **settings})
        for i, settings in enumerate(SETTINGS.values())
    ]
    for name, output in zip(SETTINGS, generate(model, beside), strict=True):
        is_person(text_of(model, output))
        tokens = list(output.outputs[0].token_ids)
        assert max(tokens) < VOCABULARY, "neither masks nor tokens that delete or insert"
        for word in SETTINGS[name].get("bad_words", ()):
            spelt = model.llm.get_tokenizer().encode(word, add_special_tokens=False)
            assert spelt not in [tokens[i : i + len(spelt)] for i in range(len(tokens))]
        if name == "log-probabilities":
            assert len(output.outputs[0].logprobs) == len(tokens)
        if name == "goes on":
            assert len(tokens) == 70
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


def test_an_answer_fits_its_tokens(engine: GetEngine, checkpoint: GetCheckpoint) -> None:
    """From as few as there can be."""
    model = engine(checkpoint("SDAR", 4), block_size=32)
    fewest = (8, 10, 12, 16, 23)
    params = [
        SamplingParams(max_tokens=most, seed=most, structured_outputs=PERSON) for most in fewest
    ]
    for most, output in zip(fewest, generate(model, params), strict=True):
        assert len(output.outputs[0].token_ids) <= most
        is_person(text_of(model, output))
    with pytest.raises(VLLMValidationError, match=r"max_tokens must be at least 8 .* got 7"):
        generate(model, [SamplingParams(max_tokens=7, structured_outputs=PERSON)])


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
    "preempted": {"num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 320},
    "chunked": {"max_num_batched_tokens": 40},
    "asynchronous": {"async_scheduling": True},
}


def mixed_params(family: str) -> list[SamplingParams]:
    """Of Nemotron, in its other modes, too."""
    ways = [xargs(accept_probability=0.3)]
    if family == "Nemotron":
        ways += [xargs(mode="self_speculation"), xargs(mode="autoregressive")]
    return [
        SamplingParams(**{"max_tokens": 70, "seed": i, **kind}, **ways[i % len(ways)])
        for i, kind in enumerate(MIX)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_in_any_company(
    engine: GetEngine, checkpoint: GetCheckpoint, family: str, asynchronous: None
) -> None:
    """Neighbours without a grammar are not touched either."""
    path, params = checkpoint(family, 32), mixed_params(family)
    model = engine(path, block_size=32, max_num_seqs=1, async_scheduling=False)
    alone = [list(output.outputs[0].token_ids) for output in generate(model, params)]
    for name, options in COMPANY.items():
        options = {"async_scheduling": False, "block_size": 32, **options}
        model = engine(path, disable_log_stats=False, **options)
        found = [list(output.outputs[0].token_ids) for output in generate(model, params)]
        assert found == alone, name
        if name == "preempted":
            assert preemptions(model) > 0


def test_the_trained_model_writes_what_it_writes_anyway(engine: GetEngine) -> None:
    """JSON that it knows."""
    model = engine(CHECKPOINTS / "sdar-tiny")
    lines = (CHECKPOINTS / "held_out.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["task"] == "write_json"][:12]
    for wanted in (None, of(json_object=True)):
        params = SamplingParams(
            max_tokens=64,
            temperature=0.0,
            structured_outputs=wanted,
            **xargs(accept_probability=0.9),
        )
        outputs = model.llm.chat([row["messages"] for row in rows], params, use_tqdm=False)
        steps = [len(model.steps(output.request_id)) for output in outputs]
        print(f"{wanted is not None}: {sum(steps)} steps")
        texts = [output.outputs[0].text for output in outputs]
        right = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
        assert sum(right) >= len(rows) - 1
