"""A bad request is answered with 400, says what is wrong, and the server lives on. All that is bad
is in `tests/unit/requests`."""

import json
from typing import Any
from urllib.error import HTTPError

import pytest
from openai import BadRequestError
from PIL import Image

from tests.pictures import data_url as url_of_bytes
from tests.pictures import encoded
from tests.server.conftest import CANVAS, MAX_MODEL_LEN, Server

PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -0.5}, "temperature must be non-negative, got -0.5"),
    "a seed that leaves no room for the second answer's": (
        {"seed": 2**63 - 1, "n": 2},
        "seed must be from .* for n = 2",
    ),
    "more answers than served": ({"n": 65}, "at most 64 answers .* got 65.* limits.n"),
}
PIXEL = Image.new("RGB", (1, 1))
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    "a call that must come": (
        {"tools": [TOOL], "tool_choice": "required"},
        "tool_choice must be 'auto' or 'none' on this server, got 'required'",
    ),
    "a call that nobody looks for": ({"tools": [TOOL]}, "--enable-auto-tool-choice"),
}


def ask(server: Server, **options: Any) -> str:
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Sort: b a"}],
        max_tokens=CANVAS,
        **options,
    )
    return answer.choices[0].message.content


@pytest.fixture(scope="module", autouse=True)
def server_lives_on(server: Server):
    yield
    assert ask(server)


# --- the same on every route, streamed or not ---------------------------------------------------

TEXT = "Sort: b a"
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "completions": {"prompt": TEXT},
    "responses": {"input": TEXT},
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": CANVAS},
}
WIDE = {"type": "object", "properties": {"a": {"const": "a long text " * 3}}, "required": ["a"]}


def held_to(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the field that a route has for it."""
    named = {"name": "answer", "schema": schema}
    chat = {"response_format": {"type": "json_schema", "json_schema": named}}
    return {
        "chat/completions": chat,
        "completions": chat,
        "responses": {"text": {"format": {"type": "json_schema", **named}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }


def everywhere(**members: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(ROUTES, members)


def with_few_tokens(members: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        path: {**own, "max_output_tokens" if path == "responses" else "max_tokens": 3}
        for path, own in members.items()
    }


MISTAKES: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "no steps": (everywhere(vllm_xargs={"diffusion_max_steps": 0}), "diffusion_max_steps must be"),
    "a key misspelt": (everywhere(vllm_xargs={"diffusion_max_stepz": 1}), "diffusion_max_steps?"),
    "a key misplaced": (everywhere(diffusion_max_steps=1), "belongs in vllm_xargs"),
    "the client's argument": (
        everywhere(extra_body={"vllm_xargs": {"diffusion_max_steps": 1}}),
        "belongs in vllm_xargs",
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
        {
            path: {"structured_outputs": {"regex": "a(?=b)c"}}
            for path in ("chat/completions", "completions", "responses")
        },
        "structured_outputs.regex",
    ),
    "a stop token that there is not": (
        {
            path: {"stop_token_ids": [10**6]}
            for path in ("chat/completions", "completions", "responses")
        },
        "stop_token_ids",
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
    body = {"model": server.model, **ROUTES[path], **by_path[path], "stream": stream}
    seen = len(server.log.read_bytes())
    assert message in refusal(server, path, body)["message"]
    lines = server.log.read_bytes()[seen:].decode().splitlines()
    ours = [line for line in lines if "/v1/" in line or "rror" in line or "Traceback" in line]
    assert len(ours) == 1 and "INFO" in ours[0] and "400 Bad Request" in ours[0], ours


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_out_of_range(server: Server, name: str) -> None:
    options, message = PARAMETERS[name]
    with pytest.raises(BadRequestError, match=message):
        ask(server, **options)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_diffusion_model_cannot_give(server: Server, name: str) -> None:
    options, message = CALLS[name]
    with pytest.raises(BadRequestError, match=message):
        ask(server, **options)


def test_completion_by_beam_search(server: Server) -> None:
    with pytest.raises(BadRequestError, match="use_beam_search"):
        server.client.completions.create(
            model=server.model, prompt="Sort: b a", extra_body={"use_beam_search": True}
        )


def test_response_with_tools(server: Server) -> None:
    tool = {"type": "function"} | TOOL["function"]
    with pytest.raises(BadRequestError, match="--enable-auto-tool-choice"):
        server.client.responses.create(model=server.model, input="Sort: b a", tools=[tool])


def test_prompt_longer_than_the_context(server: Server) -> None:
    with pytest.raises(BadRequestError, match=str(MAX_MODEL_LEN)):
        server.client.completions.create(
            model=server.model, prompt=[9] * (MAX_MODEL_LEN + 1), max_tokens=1
        )


def test_more_prompt_log_probabilities_than_served(server: Server) -> None:
    """Of two prompts that would be served one at a time."""
    with pytest.raises(BadRequestError, match=r"2048 log-probabilities .* limits.prompt_logprobs"):
        server.client.completions.create(
            model=server.model,
            prompt=[[9] * 60, [8] * 60],
            max_tokens=1,
            extra_body={"prompt_logprobs": 20},
        )


def test_image(server: Server) -> None:
    image = {"type": "image_url", "image_url": {"url": url_of_bytes(encoded(PIXEL), "image/png")}}
    with pytest.raises(BadRequestError, match=r"(?i)image|multi.?modal"):
        server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}],
            max_tokens=CANVAS,
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", "NaN"),
        ("repetition_penalty", "1e-320"),
        ("seed", "1e400"),
        ("logit_bias", '{"5": NaN, "x": 1}'),
        ("vllm_xargs", '{"diffusion_entropy_bound": Infinity}'),
    ],
)
def test_numbers_that_json_has_not(server: Server, key: str, value: str) -> None:
    body = f'{{"model": {json.dumps(server.model)}, "prompt": "Hi", "{key}": {value}}}'
    assert refusal(server, "completions", body)["message"]


def refusal(server: Server, path: str, body: str | dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(HTTPError) as refused:
        server.read(f"/v1/{path}", body)
    assert refused.value.code == 400
    answer = json.load(refused.value)
    assert (answer.get("type") == "error") == (path == "messages"), answer  # each in its form
    return answer["error"]
