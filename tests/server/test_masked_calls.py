"""Tool calls of a masked model, as OpenAI's clients ask for them. The shipped one was trained on
none, so only their form is right. And what it says of when its tokens were revealed, and of masks.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError
from transformers import AutoTokenizer

from tests.paths import CHECKPOINTS
from tests.server.conftest import Server, serving
from tests.server.test_documented import require_a_decision

SDAR = CHECKPOINTS / "sdar-tiny"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", city={"enum": ["Lima", "Rome"]}, days={"type": "integer"}),
    tool("remind", when={"type": "string"}, loud={"type": "boolean"}),
]
SCHEMAS = {found["function"]["name"]: found["function"]["parameters"] for found in TOOLS}
CALL = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(SDAR, tmp_path_factory.mktemp("calling"), *options) as it:
        yield it


def ask(server: Server, tool_choice: Any, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=str(SDAR),
        messages=[{"role": "user", "content": "Sort: q d x a"}],
        tool_choice=tool_choice,
        **{"tools": TOOLS, "max_tokens": 120, **options},
    )


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def named(name: str) -> dict[str, Any]:
    """A `tool_choice`."""
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_call_must_come(calling: Server, temperature: float) -> None:
    for seed in range(3):
        answer = ask(calling, "required", seed=seed, temperature=temperature).choices[0]
        assert answer.message.tool_calls and not answer.message.content
        for call in answer.message.tool_calls:
            check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_one_must_come(calling: Server, name: str) -> None:
    (call,) = ask(calling, named(name), seed=1).choices[0].message.tool_calls
    assert call.function.name == name
    check(name, call.function.arguments)


@pytest.mark.parametrize("tool_choice", ["required", named("remind")], ids=["required", "named"])
def test_streamed_is_the_same(calling: Server, tool_choice: Any) -> None:
    whole = ask(calling, tool_choice, seed=2).choices[0].message.tool_calls
    found: dict[int, list[str]] = {}
    for chunk in ask(calling, tool_choice, seed=2, stream=True):
        for part in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            call = found.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
    # vLLM writes the arguments anew where it has all of them.
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        (call.function.name, json.loads(call.function.arguments)) for call in whole
    ]


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_an_answer_without_a_call_is_what_it_was(calling: Server, tool_choice: str) -> None:
    answer = ask(calling, tool_choice, temperature=0.0).choices[0].message
    assert answer.content == "a d q x" and not answer.tool_calls


def test_a_call_that_happens_to_come_is_found(calling: Server) -> None:
    """The model has learnt to write none, so a form brings it about."""
    written = f"<tool_call>{json.dumps(CALL)}</tool_call>"
    form = {"structured_outputs": {"choice": [written]}}
    # Beside functions that are not strict, which add no form of their own.
    tools = [{**it, "function": {**it["function"], "strict": False}} for it in TOOLS]
    answer = ask(calling, "auto", tools=tools, extra_body=form, max_tokens=250).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == tuple(CALL.values())


def test_too_few_tokens_for_a_call_are_refused(calling: Server) -> None:
    with pytest.raises(BadRequestError, match=r"max_tokens must be at least \d+ .*, got 8"):
        ask(calling, "required", max_tokens=8)


def test_log_probabilities_come_with_their_step(calling: Server) -> None:
    """In chats and completions, streamed or not, and nothing of it where nobody asks."""
    asked = {"vllm_xargs": {"diffusion_logprobs": "unmask", "diffusion_acceptance": "in_order"}}
    common: dict[str, Any] = {"model": str(SDAR), "temperature": 0.0, "max_tokens": 8}
    messages = [{"role": "user", "content": "Sort: q d x a"}]

    def entries(**options: Any) -> list[Any]:
        options = {**common, "messages": messages, "logprobs": True, **options}
        chat = calling.client.chat.completions.create(**options)
        chunks = chat if options.get("stream") else [chat]
        kept = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        return [entry for found in kept if found is not None for entry in found.content]

    whole = [(it.token, it.logprob, it.step) for it in entries(extra_body=asked)]
    assert {1, 2} <= {step for _, _, step in whole} <= {1, 2, 3, 4}
    streamed = entries(extra_body=asked, stream=True)
    assert [(it.token, it.logprob, it.step) for it in streamed] == whole
    assert not any("step" in it.model_dump() for it in entries())

    def scores(**options: Any) -> list[Any]:
        options = {**common, "prompt": "Sort: q d x a", "logprobs": 1, **options}
        completion = calling.client.completions.create(**options)
        chunks = completion if options.get("stream") else [completion]
        kept = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        return [
            pair
            for found in kept
            if found is not None
            for pair in zip(found.token_logprobs, found.steps, strict=True)
        ]

    found = scores(extra_body=asked)
    assert found and all(1 <= step <= 4 for _, step in found)
    assert scores(extra_body=asked, stream=True) == found
    with pytest.raises(BadRequestError, match="diffusion_logprobs needs logprobs"):
        entries(extra_body=asked, logprobs=False)


def test_a_mask_in_a_text_is_data(calling: Server) -> None:
    """Its text is the token, as its id is, and nothing fills it in."""
    tokenizer = AutoTokenizer.from_pretrained(SDAR)
    mask_id = json.loads((SDAR / "config.json").read_text())["mask_token_id"]
    text = f"Sort: q d {tokenizer.decode([mask_id])} x a"
    ids = tokenizer.encode(text)
    assert ids.count(mask_id) == 1
    by_text, by_ids = (
        calling.client.completions.create(
            model=str(SDAR),
            prompt=prompt,
            temperature=0.0,
            max_tokens=16,
            extra_body={"echo": True},
        )
        for prompt in (text, ids)
    )
    assert by_text.usage is not None and by_text.usage.prompt_tokens == len(ids)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].text.startswith(text)


def test_decision_program(calling: Server) -> None:
    require_a_decision(calling)
