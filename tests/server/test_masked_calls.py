"""Tool calls of a masked model, as OpenAI's clients ask for them. The shipped one was trained on
none, so only their form is right. And what it says of when its tokens were revealed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError

from tests.paths import CHECKPOINTS
from tests.server.conftest import Server, serving
from tests.server.test_documented import require_a_decision

SDAR = CHECKPOINTS / "sdar-tiny"
CANVAS = 8  # two blocks


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


TOOLS = [
    tool("weather", city={"enum": ["Lima", "Rome"]}, days={"type": "integer"}),
    tool("remind", when={"type": "string"}, loud={"type": "boolean"}),
]
SCHEMAS = {found["function"]["name"]: found["function"]["parameters"] for found in TOOLS}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    calls = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    room = ("--additional-config", '{"vllm_dllm": {"blocks_in_flight": 2}}')  # for verified drafts
    folder = tmp_path_factory.mktemp("calling")
    with serving(SDAR, folder, "--enforce-eager", *calls, *room) as it:
        yield it


QUESTION = "Sort: q d x a"


def ask(server: Server, tool_choice: Any, **options: Any) -> Any:
    asked = {"tools": TOOLS, "max_tokens": 120, **options}
    return server.chat(QUESTION, tool_choice=tool_choice, **asked)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_call_must_come(calling: Server, temperature: float) -> None:
    for seed in range(3):
        answer = ask(calling, "required", seed=seed, temperature=temperature).choices[0]
        assert answer.message.tool_calls and not answer.message.content
        for call in answer.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_one_must_come(calling: Server, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    (call,) = ask(calling, choice, seed=1).choices[0].message.tool_calls
    assert call.function.name == name
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[name])


def test_an_answer_without_a_call_is_what_it_was(calling: Server) -> None:
    """Beside strict functions, whose form begins where a call does."""
    answer = ask(calling, "auto", temperature=0.0).choices[0].message
    assert answer.content == "a d q x" and not answer.tool_calls


def test_log_probabilities_come_with_their_step(calling: Server) -> None:
    """In chats and completions, streamed or not, and nothing of it where nobody asks."""
    asked = {"vllm_xargs": {"diffusion_logprobs": "unmask", "diffusion_acceptance": "in_order"}}
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}

    def entries(**options: Any) -> list[Any]:
        chat = calling.chat(QUESTION, **{**common, "logprobs": True, **options})
        chunks = chat if options.get("stream") else [chat]
        kept = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        return [entry for found in kept if found is not None for entry in found.content]

    whole = [(it.token, it.logprob, it.step) for it in entries(extra_body=asked)]
    assert {1, 2} <= {step for _, _, step in whole} <= set(range(1, CANVAS + 1))
    streamed = entries(extra_body=asked, stream=True)
    assert [(it.token, it.logprob, it.step) for it in streamed] == whole
    assert not any("step" in it.model_dump() for it in entries())

    def scores(**options: Any) -> list[Any]:
        options = {"model": calling.model, **common, "logprobs": 1, **options}
        completion = calling.client.completions.create(prompt=QUESTION, **options)
        chunks = completion if options.get("stream") else [completion]
        kept = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        return [
            pair
            for found in kept
            if found is not None
            for pair in zip(found.token_logprobs, found.steps, strict=True)
        ]

    found = scores(extra_body=asked)
    assert found and all(1 <= step <= CANVAS for _, step in found)
    assert scores(extra_body=asked, stream=True) == found
    with pytest.raises(BadRequestError, match="diffusion_logprobs needs logprobs"):
        entries(extra_body=asked, logprobs=False)


VERIFIED = {"vllm_xargs": {"diffusion_acceptance": "verified"}}


def test_verified_drafts(calling: Server) -> None:
    """Alone and in a crowd, streamed or not, with and without a form."""

    def sort(letters: str, **options: Any) -> Any:
        asked = {"temperature": 0.0, "max_tokens": 20, "extra_body": VERIFIED}
        return calling.chat(f"Sort: {letters}", **asked | options)

    wanted = {"q d x a": "a d q x", "c b a": "a b c", "m z k": "k m z"}
    with ThreadPoolExecutor(len(wanted)) as crowd:
        answers = list(crowd.map(sort, wanted))
    assert [answer.choices[0].message.content for answer in answers] == list(wanted.values())
    chunks = list(sort("q d x a", stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == "a d q x"
    (call,) = ask(calling, "required", extra_body=VERIFIED).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    useless = {"vllm_xargs": VERIFIED["vllm_xargs"] | {"diffusion_accept_probability": 0.5}}
    with pytest.raises(BadRequestError, match="is not for diffusion_acceptance 'verified'"):
        sort("q d x a", extra_body=useless)


def test_decision_program(calling: Server) -> None:
    require_a_decision(calling)
