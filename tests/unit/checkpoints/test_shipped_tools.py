"""The shipped model that calls functions: as its README says, in transformers."""

import json

import pytest
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.calls.tasks import SERVING_NOTE
from checkpoints.recipes.calls.tokenizer import build_calling_tokenizer
from checkpoints.recipes.exact_match import answer_rows, read_rows, summarize
from tests.paths import CHECKPOINTS

pytestmark = pytest.mark.numerics

CHECKPOINT = CHECKPOINTS / "diffusiongemma-tiny-tools"


@pytest.fixture(scope="module")
def model():
    return DiffusionGemmaForBlockDiffusion.from_pretrained(CHECKPOINT).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 4.2e6


def test_tokenizer_is_the_one_the_code_builds(tokenizer) -> None:
    built = build_calling_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template


@pytest.mark.parametrize(("name", "every"), [("held_out_tools", 8), ("held_out", 16)])
def test_answers_held_out_prompts(model, tokenizer, name: str, every: int) -> None:
    torch.manual_seed(0)
    rows = read_rows(CHECKPOINTS / f"{name}.jsonl")[::every]
    answered = answer_rows(model, tokenizer, rows)
    wrong = [(row["answer"], row["output"]) for row in answered if row["output"] != row["answer"]]
    assert summarize(answered)["all"]["exact_match"] >= 0.9, wrong


def test_answers_what_its_note_promises(model, tokenizer) -> None:
    torch.manual_seed(0)
    assert model.config.serving_note == SERVING_NOTE
    request = "Please lamp age 3, city 'Rome'."
    assert request in SERVING_NOTE
    properties = {"city": {"type": "string"}, "age": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": found}}}
        for name, found in {"bell": {"day": {"type": "string"}}, "lamp": properties}.items()
    ]
    row = {"task": "note", "messages": [{"role": "user", "content": request}], "tools": tools}
    (answered,) = answer_rows(model, tokenizer, [json.loads(json.dumps(row))])
    quote = '<|"|>'
    assert answered["output"] == (
        f"<|tool_call>call:lamp{{age:3,city:{quote}Rome{quote}}}<tool_call|>"
    )
