"""Structured outputs: always valid, and no worse than free answers. In any
company: `test_large_vocabulary.py`."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.conftest import HELD_OUT, TRAINED, Engine, GetEngine, GetTiny
from tests.engine.one_step import random_ids
from tests.unit.grammar.canvases import SCHEMAS
from vllm_dllm.step.asked.grammars import CanvasGrammars

EOS = 1
# Unlike anything the model was trained on.
ODD = [{"role": "user", "content": "kq 7 {w: 3 zx"}]
PERSON = SCHEMAS["person"]
OPTIONS = {"max_num_seqs": 16, "max_model_len": 512}
TAG = {
    "structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call>"],
}


def of(**wanted: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**wanted)


def is_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


def is_an_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def calls_are_people(text: str) -> None:
    for part in text.split("<call>")[1:]:
        if "</call>" in part:
            is_person(part.split("</call>")[0])


KINDS: dict[str, tuple[StructuredOutputsParams, Callable[[str], None]]] = {
    "json": (of(json=PERSON), is_person),
    "json text": (of(json=json.dumps(PERSON)), is_person),
    "json_object": (of(json_object=True), is_an_object),
    "regex": (of(regex=r"[A-Z]{3}-[0-9]{2,4}"), matches(r"[A-Z]{3}-[0-9]{2,4}")),
    "choice": (of(choice=["red", "green", "light blue"]), matches("red|green|light blue")),
    "grammar": (of(grammar='start: "a"+ "-" /[0-9]{3}/'), matches("a+-[0-9]{3}")),
    "grammar, GBNF": (of(grammar='root ::= "yes" | "no " [0-9]'), matches("yes|no [0-9]")),
    "structural_tag": (of(structural_tag=json.dumps(TAG)), calls_are_people),
}


@pytest.fixture(scope="module")
def served(engine: GetEngine) -> Engine:
    return engine(TRAINED, settings={"fit_canvas": True}, **OPTIONS)


def xargs(**options: Any) -> dict[str, Any]:
    return {"extra_args": {f"diffusion_{name}": value for name, value in options.items()}}


def chat(served: Engine, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    return served.llm.chat(prompts, params, use_tqdm=False)


def of_kind(kind: str, **options: Any) -> SamplingParams:
    """In few steps, each of which finds its way through the form."""
    extra = {"diffusion_max_steps": 12, **options.pop("extra_args", {})}
    asked = {"max_tokens": 96, "seed": 7, "structured_outputs": KINDS[kind][0], **options}
    return SamplingParams(**asked, extra_args=extra)


def ask(served: Engine, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """All in one batch."""
    return chat(served, [ODD] * len(params), [*params])


def text_of(served: Engine, output: RequestOutput, index: int = 0) -> str:
    """What comes before the token that ends it. Not `text`, which begins with the prompt where that
    ends amid a character. An answer that vLLM's own grammar rejects would end with an error."""
    answer = output.outputs[index]
    assert answer.finish_reason in ("stop", "length")
    tokens = list(answer.token_ids)
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return served.llm.get_tokenizer().decode(tokens[:end])


def check_person(served: Engine, options: dict[str, Any], output: RequestOutput) -> None:
    """Whatever else the request asked for."""
    for index, answer in enumerate(output.outputs):
        is_person(text_of(served, output, index))
        tokens = list(answer.token_ids)
        for word in options.get("bad_words", ()):
            spelt = served.llm.get_tokenizer().encode(word, add_special_tokens=False)
            assert spelt not in [tokens[i : i + len(spelt)] for i in range(len(tokens))]
        if "logprobs" in options:
            assert len(answer.logprobs) == len(tokens)
        if "max_tokens" in options:  # it goes on behind its end
            assert len(tokens) == options["max_tokens"]


two_seeds = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])


@two_seeds
def test_every_kind_is_kept(served: Engine, seed: int) -> None:
    outputs = ask(served, [of_kind(kind, seed=seed) for kind in KINDS])
    for (_, check), output in zip(KINDS.values(), outputs, strict=True):
        check(text_of(served, output))


SETTINGS: dict[str, dict[str, Any]] = {
    "one step": xargs(max_steps=1),
    "hot": {"temperature": 2.0, **xargs(max_steps=3)},
    "greedy": {"temperature": 0.0},
    "a wrong prediction": xargs(prediction=[40, 41, 42] * 30),
    "confidence": xargs(acceptance="confidence", accept_probability=0.5),
    "top_k": xargs(acceptance="top_k", max_steps=6),
    "truncated": {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 2.0},
    "bias": {"logit_bias": {33: 50.0}},
    "excluded": {"bad_words": ["name"]},
    "several excluded": {"bad_words": ["name", "ge", "er", "1"]},
    "narrow canvases": xargs(canvas_length=16),
    "read only": {"max_tokens": 64, **xargs(read_only=True, max_steps=3)},
    "several": {"n": 3},
    "log-probabilities": {"logprobs": 2},
    "to go on": {"ignore_eos": True, "max_tokens": 130},
}


@two_seeds
def test_beside_other_parameters(served: Engine, seed: int) -> None:
    asked = [of_kind("json", **{"seed": seed, **options}) for options in SETTINGS.values()]
    for options, output in zip(SETTINGS.values(), ask(served, asked), strict=True):
        check_person(served, options, output)


def test_an_answer_fits_its_tokens(served: Engine) -> None:
    fewest = (8, 9, 10, 12, 16, 23)
    outputs = ask(served, [of_kind("json", max_tokens=most) for most in fewest])
    for most, output in zip(fewest, outputs, strict=True):
        assert len(output.outputs[0].token_ids) <= most
        is_person(output.outputs[0].text)
    with pytest.raises(VLLMValidationError, match=r"max_tokens must be at least 8 .* got 7"):
        ask(served, [of_kind("json", max_tokens=7)])


@pytest.mark.numerics
def test_a_block_that_breaks_the_form_ends_the_answer(
    served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has a grammar of its own, which a worker without one does not get past."""
    monkeypatch.setattr(CanvasGrammars, "any_in", lambda self, batch: False)
    (output,) = ask(served, [of_kind("json", max_tokens=64)])
    assert output.outputs[0].finish_reason == "error"


def test_json_that_the_model_writes_anyway_is_not_changed(served: Engine) -> None:
    rows = [row for row in HELD_OUT if row["task"] == "write_json"][:24]
    prompts = [row["messages"] for row in rows]
    free = [SamplingParams(max_tokens=64, seed=i) for i in range(len(rows))]
    held = [
        SamplingParams(max_tokens=64, seed=i, structured_outputs=of(json_object=True))
        for i in range(len(rows))
    ]
    as_it_is, with_grammar = chat(served, prompts, free), chat(served, prompts, held)
    right = [
        output.outputs[0].text == row["answer"] for output, row in zip(as_it_is, rows, strict=True)
    ]
    assert sum(right) >= len(rows) - 1
    for output, other in zip(with_grammar, as_it_is, strict=True):
        assert output.outputs[0].text == other.outputs[0].text
    steps = [
        sum(len(served.steps(output.request_id)) for output in outputs)
        for outputs in (with_grammar, as_it_is)
    ]
    assert steps[0] <= steps[1]


def test_random_weights_answer_in_every_form(engine: GetEngine, tiny: GetTiny) -> None:
    served = engine(tiny(32), **OPTIONS)
    params = [
        SamplingParams(
            max_tokens=100 + i, seed=i, structured_outputs=of(json=schema), **xargs(max_steps=2)
        )
        for i, schema in enumerate(SCHEMAS.values())
    ]
    prompts = [random_ids(7, 490, i) for i in range(len(params))]
    outputs = served.ask(prompts, params)
    for schema, output in zip(SCHEMAS.values(), outputs, strict=True):
        jsonschema.validate(json.loads(text_of(served, output)), schema)
