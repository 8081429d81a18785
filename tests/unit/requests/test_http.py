"""What a client may ask for over HTTP is decided before anything is made of it. A body that vLLM's
checks take for something else is the client's mistake, not the server's."""

import json
import re
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.launchers import app as server
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm import plugin
from vllm_dllm.compat import http
from vllm_dllm.requests.http import (
    check_body_without_xargs,
    check_messages,
    check_request_body,
    check_text,
    wrong_type_error,
)

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
CHAT_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
RESPONSE_TOOL = {"type": "function", "name": "look_up", "parameters": PARAMETERS}


def chat(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **options}


def response(**options: Any) -> dict[str, Any]:
    return {"input": "Hi", **options}


NAMED_CHAT = {"type": "function", "function": {"name": "look_up"}}
ENABLE = "--enable-auto-tool-choice"
MESSAGE_TOOL = {"name": "look_up", "input_schema": PARAMETERS}
TELLS, PARSES, NO_PARSER = "a parser that tells the form of calls", "a parser", "no parser"
CALLS: dict[str, tuple[dict[str, Any], str, str | None]] = {  # and which server answers it
    "chat, required": (chat(tools=[CHAT_TOOL], tool_choice="required"), "got 'required'", TELLS),
    "chat, named": (chat(tools=[CHAT_TOOL], tool_choice=NAMED_CHAT), "got .*look_up", TELLS),
    "message, any": (chat(tools=[MESSAGE_TOOL], tool_choice={"type": "any"}), "got .*any", TELLS),
    "chat": (chat(tools=[CHAT_TOOL]), ENABLE, PARSES),
    "chat, auto": (chat(tools=[CHAT_TOOL], tool_choice="auto"), ENABLE, PARSES),
    "response": (response(tools=[RESPONSE_TOOL]), ENABLE, PARSES),
    "message, auto": (chat(tools=[MESSAGE_TOOL], tool_choice={"type": "auto"}), ENABLE, PARSES),
    "chat by beams": (chat(use_beam_search=True), "set n", None),
}
SCHEMA = {"type": "object", "properties": {"window_rule": {}, "diffusion_max_steps": {}}}
ADMITTED = {
    "chat": chat(),
    "chat, n": chat(n=3),
    "tools that are not to be called": chat(tools=[CHAT_TOOL], tool_choice="none"),
    "message, no calls": chat(tools=[MESSAGE_TOOL], tool_choice={"type": "none"}),
    "response": response(),
    "completion": {"prompt": "Hi"},
    "completion, a key that it has not": {"prompt": "Hi", "tools": [CHAT_TOOL]},
    "keys where they belong": chat(vllm_xargs={"diffusion_max_steps": 3, "foo": 1}),
    "names that a user chose": chat(
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        metadata={"diffusion_max_steps": "1"},
        tools=[],
    ),
    "a schema of /v1/messages": chat(output_config={"format": {"schema": SCHEMA}}),
    "a choice among tools": response(tool_choice={"type": "allowed_tools", "mode": "auto"}),
    "parts": {
        "messages": [
            {"role": "user", "source": "me", "content": [{"type": "image_url", "image_pil": None}]},
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a"}}, 5]},
        ]
    },
    "names that end as ours": chat(effusion_mode=1, diffuse_mode=1, infusion_mode=1, my_pinned=1),
    "names that others have, too": chat(limits=3, logprobs=True, extra={"defaults": {}}),
}
MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "nesting forgotten": (
        {"diffusion_max_steps": 1},
        'diffusion_max_steps belongs in vllm_xargs, got it in the body. Write "vllm_xargs": '
        '{"diffusion_max_steps": ...}; with the OpenAI client, extra_body={"vllm_xargs": ',
    ),
    "of a name that others have, too": (
        {"logprobs": True, "diffusion_logprobs": "unmask"},
        "diffusion_logprobs belongs in vllm_xargs",
    ),
    "in a list": ({"a": [{"b": [[{"diffusion_t_min": 1}]]}]}, "got it in a.b. Write"),
    "in camelCase": ({"diffusionMaxSteps": 1}, '"vllm_xargs": {"diffusion_max_steps": ...}'),
    "in camelCase, without its prefix": ({"maxSteps": 1}, "maxSteps belongs in vllm_xargs"),
    "and misspelt": ({"Diffusion_max_stepz": 1}, '"vllm_xargs": {"diffusion_max_steps": ...}'),
    **{
        f"and its prefix misspelt, {name}": (
            {name: 1},
            f'{name} belongs in vllm_xargs, got it in the body. Write "vllm_xargs": '
            '{"diffusion_mode": ...}',
        )
        for name in (
            *("difusion_mode", "diffuxion_mode", "diffussion_mode", "diffusoin_mode"),
            *("diffusionmode", "diffusion__mode", "diffusions_mode", "diffusion.mode"),
        )
    },
    "unknown": ({"diffusion_foo_bar": 1}, "diffusion_foo_bar belongs in vllm_xargs"),
    "without its prefix": ({"max_steps": 1}, '"vllm_xargs": {"diffusion_max_steps": ...}'),
    "the client's argument": (
        {"extra_body": {"vllm_xargs": {"diffusion_t_min": 1}}},
        "diffusion_t_min belongs in vllm_xargs, got it in extra_body.vllm_xargs. Write",
    ),
    "offline's argument": ({"extra_args": {"diffusion_pinned": [1]}}, "got it in extra_args"),
    "a template's": ({"chat_template_kwargs": {"diffusion_max_steps": 1}}, "belongs in vllm_xargs"),
    "in the words of --diffusion-config": (
        {"max_denoising_steps": 1},
        'max_denoising_steps belongs in vllm_xargs, got it in the body. Write "vllm_xargs": '
        '{"diffusion_max_steps": ...}',
    ),
    "a setting": ({"commit_last_block": True}, "commit_last_block is a setting of the server"),
    "vLLM's settings": (
        {"diffusion_config": {"canvas_length": 16}},
        "diffusion_config is a setting of the server, got it in a request. Start the server with "
        "--diffusion-config for it",
    ),
    "settings": ({"vllm_dllm": {"window_rule": "x"}}, "vllm_dllm is a setting of the server"),
    "a rule for both": ({"window_rule": "x"}, '"vllm_xargs": {"diffusion_window_rule": ...}'),
}


WRONG_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "an image of Python's": ({"image_pil": "AAAA"}, "image_pil is for programs that call vLLM"),
    "a sound": ({"type": "input_audio", "input_audio": 5}, "input_audio has another type .* got 5"),
    "an image of /v1/messages": ({"type": "image", "source": [1]}, r"source has .* got \[1\]"),
    "no image": ({"type": "image", "source": None}, r"source has .* got None"),
}


def check(body: dict[str, Any], server: str = NO_PARSER) -> None:
    check_request_body(body, parses_tool_calls=server == PARSES, forces_tool_calls=server == TELLS)


@pytest.mark.parametrize("server", [NO_PARSER, PARSES, TELLS])
@pytest.mark.parametrize("case", CALLS)
def test_calls_need_a_parser_that_reads_or_tells_them(case: str, server: str) -> None:
    body, message, served_by = CALLS[case]
    if server == served_by:
        check(body, server)
        return
    with pytest.raises(VLLMValidationError, match=message):
        check(body, server)


@pytest.mark.parametrize("case", ADMITTED)
def test_admitted(case: str) -> None:
    body = json.loads(json.dumps(ADMITTED[case]))
    check(body)
    assert body == ADMITTED[case]


@pytest.mark.parametrize("case", MISPLACED)
def test_what_stands_where_nobody_looks_is_refused(case: str) -> None:
    wrong, message = MISPLACED[case]
    for body in (chat(**wrong), response(**wrong), {"prompt": "Hi", **wrong}):
        with pytest.raises(VLLMValidationError) as refusal:
            check(body)
        assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_parts_of_another_type(case: str) -> None:
    part, message = WRONG_PARTS[case]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    for parts in ([part], [{"type": "text", "text": "Hi"}, part], [result]):
        messages = [{"role": "user", "content": parts}]
        for of_route in (messages, [messages]):  # as a batch has them
            with pytest.raises(VLLMValidationError, match=message):
                check({"messages": of_route})


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_tokens_are_counted_of_parts_that_are_served(client: TestClient, case: str) -> None:
    """Keys of requests are left alone: a client counts the body that it sends next."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, WRONG_PARTS[case][0]]}]
    answer = client.post("/tokenize", json={"messages": messages})
    assert answer.status_code == 400
    assert re.search(WRONG_PARTS[case][1], answer.json()["error"]["message"])
    body = chat(vllm_xargs={"diffusion_max_steps": 2}, diffusion_max_steps=2)
    assert client.post("/tokenize", json=body).status_code == 200


WITHOUT_XARGS: dict[str, dict[str, Any]] = {
    "systemone": {"state": {"diffusion_max_steps": 1}, "questions": {"steps": {"type": "noul"}}},
    "scoring": {"query": "Is it?", "items": ["yes", "no"], "label_token_ids": [5, 6]},
    "tokens": {
        "token_ids": [5],
        "sampling_params": {
            **dict.fromkeys(SamplingParams.__struct_fields__),
            "extra_args": {"diffusion_max_steps": 1},
        },
    },
}


def test_half_of_a_character_is_refused() -> None:
    half = "😀\ud83d"
    for is_ascii in (True, False):  # as clients write what is not

        def check(body: dict[str, Any], is_ascii: bool = is_ascii) -> None:
            check_text(json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"))

        check(chat(name="😀"))
        check_text(b'{"name": "\\ud83d"')  # the route says that this is no JSON
        for wrong in ({"stop": [half]}, {"name": {"a": half}}, {"name": {half: 1}}):
            with pytest.raises(VLLMValidationError, match=r"valid Unicode.*😀\\ud83d") as error:
                check(chat(**wrong))
            str(error.value).encode()  # the answer can be sent


@pytest.mark.parametrize("case", WITHOUT_XARGS)
def test_routes_without_xargs_take_no_keys_in_the_body(case: str) -> None:
    check_body_without_xargs(WITHOUT_XARGS[case])
    for name in ("vllm_xargs", "diffusion_max_steps", "Diffusion_max_stepz", "window_rule"):
        with pytest.raises(VLLMValidationError) as refusal:
            check_body_without_xargs({**WITHOUT_XARGS[case], name: {}})
        remedy = "Put it into sampling_params.extra_args" if case == "tokens" else "Leave it out"
        message = f"{name} has no effect in the body on this route. {remedy}."
        assert str(refusal.value).startswith(message) and refusal.value.parameter == name


def test_what_belongs_together_is_left_to_admission() -> None:
    """It knows the model: a masked one takes neither of the two, and was told to get both."""
    check({"vllm_xargs": {"diffusion_t_min": 0.1}})


@pytest.mark.parametrize(
    "model", [AnthropicMessagesRequest, ChatCompletionRequest, CompletionRequest, ResponsesRequest]
)
def test_no_field_of_vllms_is_taken_for_ours(model: type[BaseModel]) -> None:
    for name in model.model_fields:
        check({name: None})


def test_offline_beam_search_is_refused_for_diffusion_models_alone() -> None:
    """`LLM.beam_search` asks this first."""
    plugin.register()
    stock = SimpleNamespace(_check_supports_watermarking=lambda params: False)
    params = BeamSearchParams(beam_width=2, max_tokens=3)

    def resolve(is_diffusion: bool) -> bool:
        config = SimpleNamespace(is_diffusion=is_diffusion)
        processor = SimpleNamespace(model_config=config, vllm_config=stock)
        return InputProcessor.resolve_watermarking(processor, params)  # type: ignore[arg-type]

    with pytest.raises(VLLMValidationError, match="set n"):
        resolve(is_diffusion=True)
    assert resolve(is_diffusion=False) is False


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_diffusion=True))
    app.state.online_renderer = SimpleNamespace(parser=None)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(http, "is_server", lambda: True)
    checks = (check_request_body, check_body_without_xargs, check_messages, check_text)
    http.check_bodies(*checks, wrong_type_error)
    http.check_bodies(*checks, wrong_type_error)
    monkeypatch.undo()
    server.init_exception_handler(app)

    @app.post("/chat")
    def chat(body: ChatCompletionRequest) -> None: ...

    @app.post("/completion")
    def completion(body: CompletionRequest) -> None: ...

    @app.post("/tokenize", dependencies=[Depends(validate_json_request)])
    def tokenize(body: TokenizeChatRequest) -> None: ...

    @app.post("/v1/chat/completions/render", dependencies=[Depends(validate_json_request)])
    def render(body: ChatCompletionRequest) -> None: ...

    @app.get("/health")
    def health() -> None:
        raise TypeError("what is wrong")

    @app.post("/invocations")
    async def invocations(raw_request: Request) -> None:
        ChatCompletionRequest.model_validate(await raw_request.json())

    @app.post("/ours")
    def ours(body: CompletionRequest) -> Any:
        return {}["a mistake of the server's"]

    return TestClient(app, raise_server_exceptions=False)


def post(client: TestClient, path: str, member: str) -> tuple[int, dict[str, Any]]:
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "prompt": "Hi", {member}}}'
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    return answer.status_code, (answer.json() or {}).get("error", {})


@pytest.mark.parametrize("value", ["NaN", "5", '"json"', "[1]", "true"])
@pytest.mark.parametrize("path", ["/chat", "/completion", "/invocations"])
def test_structured_outputs_of_another_type(client: TestClient, path: str, value: str) -> None:
    status, error = post(client, path, f'"structured_outputs": {value}')
    assert status == 400, error
    assert error["param"] == "structured_outputs"
    assert error["message"].startswith("structured_outputs has another type than is expected, got")


def test_messages_of_another_type(client: TestClient) -> None:
    """vLLM answers that they are not iterable."""
    for value in ("null", "5", "true"):
        status, error = post(client, "/chat", f'"messages": {value}')
        assert (status, error["param"]) == (400, "messages")
        assert error["message"].startswith("messages has another type than is expected, got")


def test_a_misplaced_key_of_a_request_that_is_rendered(client: TestClient) -> None:
    status, error = post(client, "/v1/chat/completions/render", '"diffusion_max_steps": 1')
    assert status == 400 and "diffusion_max_steps" in error["message"]


def test_an_error_without_a_body_keeps_its_message(client: TestClient) -> None:
    assert "what is wrong" in client.get("/health").text


def test_a_body_that_is_no_object(client: TestClient) -> None:
    answer = client.post("/completion", content="[1]", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_other_errors_keep_their_status(client: TestClient) -> None:
    """Also where vLLM quotes a number that JSON has not."""
    assert post(client, "/completion", '"n": 1')[0] == 200
    for wrong in ('"n": "many"', '"max_tokens": NaN'):
        assert post(client, "/completion", wrong)[0] == 400
    assert post(client, "/ours", '"n": 1')[0] == 500


@pytest.mark.parametrize("check", [check_request_body, check_body_without_xargs])
def test_long_names_are_not_copied(check: Any) -> None:
    """The path of each name below a name of a megabyte would fill the memory."""
    deep: dict[str, Any] = {f"x{i}": {} for i in range(1000)}
    for _ in range(5):
        deep = {"k" * 200_000: deep}
    flags = dict(parses_tool_calls=True, forces_tool_calls=True)
    tracemalloc.start()
    check({"prompt": "Hi", "extra": deep}, **(flags if check is check_request_body else {}))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 << 20
