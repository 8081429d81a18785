"""The tasks of the model that calls functions: right by other means, in Gemma 4's syntax, never
held out in training; and its tokenizer leaves all other prompts as they were."""

import json
import random
import re

import jsonschema
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.calls.start import start_rows
from checkpoints.recipes.calls.tasks import (
    CALL_TASKS,
    LONGEST_REQUEST,
    PREPOSITIONS,
    CallExample,
    as_sent,
    generate_call,
    held_out_calls,
)
from checkpoints.recipes.calls.tokenizer import (
    CALL_PIECES,
    CALL_TOKENS,
    build_calling_tokenizer,
)
from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.images.prompts import prompt_ids
from checkpoints.recipes.match_heads import KEY_OFFSET
from checkpoints.recipes.tasks import TASKS, generate
from checkpoints.recipes.tokenizer import build_tokenizer
from tests.paths import CHECKPOINTS
from vllm_dllm.grammar.gemma_reading import read_calls

HELD_OUT = CHECKPOINTS / "held_out_tools.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return build_calling_tokenizer()


def examples(task: str, count: int = 200) -> list[CallExample]:
    rng = random.Random(7)
    return [generate_call(rng, task, held_out=False) for _ in range(count)]


def solve(example: CallExample) -> tuple[str, dict]:
    """The call, read from the request and the functions that are offered."""
    name, said = re.fullmatch(r"Please (\w+) (.*)\.", example.prompt).groups()
    (parameters,) = (
        tool["function"]["parameters"]
        for tool in example.tools()
        if tool["function"]["name"] == name
    )
    pairs = re.findall(r"(\w+) (\[.*?\]|[^,]+)", said)
    if pairs[0][0] not in parameters["properties"]:
        assert pairs[0][0] in PREPOSITIONS
        pairs[0] = (next(iter(parameters["properties"])), pairs[0][1])
    return name, {key: json.loads(value.replace("'", '"')) for key, value in pairs}


@pytest.mark.parametrize("task", ["call", "call_unnamed"])
def test_calls_are_those_that_were_asked_for(task: str) -> None:
    for example in examples(task):
        (call,) = read_calls(example.answer)[1]
        assert call.is_complete
        assert (call.name, json.loads(call.arguments)) == solve(example)


def test_arguments_fit_the_functions() -> None:
    seen = set()
    for example in examples("call"):
        name, arguments = solve(example)
        schemas = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools()
        }
        jsonschema.validate(arguments, schemas[name])
        seen |= {type(value) for value in arguments.values()}
        assert 2 <= len(schemas) <= 6
    assert seen == {str, int, bool, list}


def test_first_arguments_are_told() -> None:
    for example in examples("first_arguments", 50):
        first = {name: next(iter(kinds)) for name, kinds in example.functions.items()}
        pairs = [pair.split(": ") for pair in example.answer.split(", ")]
        assert pairs and all(first[name] == argument for name, argument in pairs)
        assert example.prompt == f"What is {', '.join(name for name, _ in pairs)}?"


def test_results_are_told() -> None:
    for example in examples("call_result"):
        name, _ = example.call
        assert example.answer == f"The {name} is {example.result}."
        assert example.call == solve(example)


def test_held_out_file_is_what_the_generator_writes() -> None:
    rows = read_rows(HELD_OUT)
    assert [(r["task"], r["messages"], r["tools"], r["answer"]) for r in rows] == [
        (example.task, as_sent(example.messages()), example.tools(), example.answer)
        for example in held_out_calls()
    ]
    held_out = {json.dumps([row["messages"], row["tools"]]) for row in rows}
    for task in CALL_TASKS:
        for example in examples(task):
            assert json.dumps([as_sent(example.messages()), example.tools()]) not in held_out


def test_other_prompts_are_the_same_tokens(tokenizer) -> None:
    before = build_tokenizer()
    assert len(before) == len(tokenizer)
    rng = random.Random(3)
    for task in TASKS:
        for _ in range(50):
            example = generate(rng, task, held_out=False)
            old, new = (
                t.encode(
                    t.apply_chat_template(
                        example.messages(), tokenize=False, add_generation_prompt=True
                    )
                    + example.answer
                )
                for t in (before, tokenizer)
            )
            assert old == new


def test_new_pieces_are_one_token(tokenizer) -> None:
    for text in [*CALL_TOKENS, *CALL_PIECES]:
        assert len(tokenizer.encode(text)) == 1
    special = tokenizer.encode("".join(CALL_TOKENS))
    assert tokenizer.decode(special, skip_special_tokens=True) == ""


@pytest.mark.parametrize("task", ["call", "call_unnamed"])
def test_a_request_is_as_long_as_its_call(tokenizer, task: str) -> None:
    for example in examples(task):
        request, call = tokenizer.encode(example.prompt), tokenizer.encode(example.answer)
        assert len(request) + 1 == len(call) and len(request) <= LONGEST_REQUEST


def test_first_arguments_are_where_a_look_back_head_finds_them(tokenizer) -> None:
    for example in examples("call_unnamed", 50):
        name, arguments = solve(example)
        name_id, first_id = (tokenizer.encode(text)[0] for text in (name, next(iter(arguments))))
        prompt = prompt_ids(tokenizer, as_sent(example.messages()), [], example.tools())
        declared = prompt.index(tokenizer.encode("declaration:")[0])
        answer = tokenizer.encode(example.answer)
        for tokens in (prompt[declared:], answer):
            assert tokens[tokens.index(name_id) + KEY_OFFSET] == first_id


def test_chats_with_tools_are_in_gemmas_syntax(tokenizer) -> None:
    parameters = {
        "type": "object",
        "properties": {"loud": {"type": "boolean"}, "City": {"enum": ["Rome"]}},
    }
    tools = [
        {"type": "function", "function": {"name": "ring", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop", "description": "stops"}},
    ]
    function = {"name": "ring", "arguments": {"loud": True, "City": "Rome", "days": [1, "a"]}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Ring!"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    asked = (
        "<bos><|turn>system\nBe kind."
        '<|tool>declaration:ring{parameters:{properties:{City:{type:<|"|>STRING<|"|>},'
        'loud:{type:<|"|>BOOLEAN<|"|>}}}}<tool|>'
        "<|tool>declaration:stop{parameters:{properties:{}}}<tool|><turn|>\n"
        "<|turn>user\nRing!<turn|>\n<|turn>model\n"
    )
    called = '<|tool_call>call:ring{City:<|"|>Rome<|"|>,days:[1,<|"|>a<|"|>],loud:true}<tool_call|>'
    told = '<|tool_response>response:ring{value:<|"|>done<|"|>}<tool_response|>'
    said = [*messages, {"role": "assistant", "content": "It rings."}]
    thanks = {"role": "user", "content": "Thanks!"}
    turn = "<turn|>\n<|turn>user\nThanks!<turn|>\n<|turn>model\n"
    for chat, text in {
        2: (messages[:2], asked),
        4: (messages, asked + called + told),
        6: ([*said, thanks], asked + called + told + "It rings." + turn),
        5: ([*messages[:3], thanks], asked + called + turn),
    }.values():
        made = tokenizer.apply_chat_template(
            chat, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert made == text


def test_only_new_tokens_get_new_embeddings(tokenizer) -> None:
    torch.manual_seed(0)
    path = CHECKPOINTS / "diffusiongemma-tiny"
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    rows = model.model.decoder.embed_tokens.weight
    before = rows.detach().clone()
    start_rows(model, tokenizer)
    changed = (rows != before).any(-1).nonzero().flatten().tolist()
    assert changed == sorted(tokenizer.encode(text)[0] for text in [*CALL_TOKENS, *CALL_PIECES])
    assert rows[changed].std() < 2 * before.std()
