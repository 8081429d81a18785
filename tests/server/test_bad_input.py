"""A bad request is answered with 400, says what is wrong, and the server lives on: one mistake of
each kind. All that is bad is in `tests/unit/requests`."""

import json
from typing import Any
from urllib.error import HTTPError

import pytest
from PIL import Image

from tests.pictures import data_url, encoded
from tests.server.conftest import CANVAS, MAX_MODEL_LEN, Server

TEXT = "Sort: b a"
MESSAGES = [{"role": "user", "content": TEXT}]
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": TEXT},
    "responses": {"input": TEXT},
    "messages": {"messages": MESSAGES, "max_tokens": CANVAS},
    "invocations": {"messages": MESSAGES},
}
WIDE = {"type": "object", "properties": {"a": {"const": "a long text " * 3}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
PICTURE = {"url": data_url(encoded(Image.new("RGB", (1, 1))))}


@pytest.fixture(scope="module", autouse=True)
def server_lives_on(server: Server):
    yield
    answer = server.read("/v1/chat/completions", {"model": server.model, "messages": MESSAGES})
    assert json.loads(answer)["choices"][0]["message"]["content"]


def url(path: str) -> str:
    return "/invocations" if path == "invocations" else f"/v1/{path}"


def held_to(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the field that a route has for it."""
    named = {"name": "answer", "schema": schema}
    chat = {"response_format": {"type": "json_schema", "json_schema": named}}
    return {
        "chat/completions": chat,
        "completions": chat,
        "responses": {"text": {"format": {"type": "json_schema", **named}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "invocations": chat,
    }


def everywhere(**members: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(ROUTES, members)


def except_messages(**members: Any) -> dict[str, dict[str, Any]]:
    """On routes that take vLLM's own parameters."""
    return dict.fromkeys(("chat/completions", "completions", "responses", "invocations"), members)


def with_few_tokens(members: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        path: {**own, "max_output_tokens" if path == "responses" else "max_tokens": 3}
        for path, own in members.items()
    }


MISTAKES: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "no steps": (everywhere(vllm_xargs={"diffusion_max_steps": 0}), "diffusion_max_steps must be"),
    "a key misspelt": (everywhere(vllm_xargs={"diffusion_max_stepz": 1}), "diffusion_max_steps?"),
    "a key misplaced": (
        everywhere(diffusion_max_steps=1)
        | {
            f"{path}/render": {**ROUTES[path], "diffusion_max_steps": 1}
            for path in ROUTES
            if path != "invocations"
        },
        "belongs in vllm_xargs",
    ),
    "half of a character": (
        {
            "messages/count_tokens": {"messages": [{"role": "user", "content": "\ud83d"}]},
            **{path: {"user": "\ud83d"} for path in ROUTES},
        },
        "must be valid Unicode",
    ),
    "two first canvases": (
        everywhere(
            prediction={"type": "content", "content": "a b"},
            vllm_xargs={"diffusion_seed_canvas": [1] * CANVAS},
        ),
        "both say what the first canvas holds",
    ),
    "a type that JSON has not": (held_to({"type": "objekt"}), "objekt"),
    "a form that does not fit": (with_few_tokens(held_to(WIDE)), "max_tokens must be at least"),
    "an expression that nothing fits": (
        except_messages(structured_outputs={"regex": "a(?=b)c"}),
        "structured_outputs.regex",
    ),
    "a stop token that there is not": (except_messages(stop_token_ids=[10**6]), "stop_token_ids"),
    "a seed that leaves no room for the second answer's": (
        {"completions": {"seed": 2**63 - 1, "n": 2}},
        "seed must be from ",
    ),
    "more log-probabilities than served, in two prompts": (
        {"completions": {"prompt": [[9] * 60, [8] * 60], "prompt_logprobs": 20, "stream": False}},
        "limits.prompt_logprobs",
    ),
    "a call that must come": (
        {"chat/completions": {"tools": [TOOL], "tool_choice": "required"}},
        "tool_choice must be 'auto' or 'none' on this server, got 'required'",
    ),
    "a call that nobody looks for": (
        {
            "chat/completions": {"tools": [TOOL]},
            "responses": {"tools": [{"type": "function"} | TOOL["function"]]},
        },
        "--enable-auto-tool-choice",
    ),
    "a prompt longer than the context": (
        {"completions": {"prompt": [9] * (MAX_MODEL_LEN + 1)}},
        str(MAX_MODEL_LEN),
    ),
    "a picture": (
        {
            "chat/completions": {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": PICTURE}]}
                ]
            }
        },
        "This checkpoint reads text only",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, (by_path, _) in MISTAKES.items() for path in by_path]
)
def test_a_mistake_is_found_before_the_answer_begins(
    server: Server, name: str, path: str, stream: bool
) -> None:
    """Its HTTP status says so, and the log has one line for it."""
    by_path, message = MISTAKES[name]
    body = {"model": server.model, **ROUTES.get(path, {}), "stream": stream, **by_path[path]}
    answer = refused(server, path, body, "400 Bad Request")
    is_message = path.startswith("messages")
    assert (answer.get("type") == "error") == is_message, answer  # each in its form
    assert message in answer["error"]["message"]


# /invocations serves its one model whatever the request says.
@pytest.mark.parametrize("path", [path for path in ROUTES if path != "invocations"])
def test_a_model_that_is_not_served(server: Server, path: str) -> None:
    answer = refused(server, path, {**ROUTES[path], "model": "nope"}, "404 Not Found")
    assert "nope" in answer["error"]["message"]


def refused(server: Server, path: str, body: dict[str, Any], status: str) -> Any:
    """The answer to a mistake, for which the log has one line."""
    seen = len(server.log.read_bytes())
    with pytest.raises(HTTPError) as error:
        server.read(url(path), body)
    assert error.value.code == int(status[:3])
    lines = server.log.read_bytes()[seen:].decode().splitlines()
    ours = [line for line in lines if url(path) in line or "rror" in line or "Traceback" in line]
    assert len(ours) == 1 and "INFO" in ours[0] and status in ours[0], ours
    return json.load(error.value)
