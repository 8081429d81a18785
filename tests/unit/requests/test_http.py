"""What a client may ask for over HTTP is decided before anything is made of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm import plugin
from vllm_dllm.requests.http import check_http_request

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
CHAT_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
RESPONSE_TOOL = {"type": "function", "name": "look_up", "parameters": PARAMETERS}


def chat(**options: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], **options)


def response(**options: Any) -> ResponsesRequest:
    return ResponsesRequest(input="Hi", **options)


NAMED_CHAT = {"type": "function", "function": {"name": "look_up"}}
NAMED_RESPONSE = {"type": "function", "name": "look_up"}
REFUSED = {
    "chat, required": (chat(tools=[CHAT_TOOL], tool_choice="required"), "got 'required'"),
    "chat, one function": (chat(tools=[CHAT_TOOL], tool_choice=NAMED_CHAT), "got .*look_up"),
    "response, required": (
        response(tools=[RESPONSE_TOOL], tool_choice="required"),
        "got 'required'",
    ),
    "response, one function": (
        response(tools=[RESPONSE_TOOL], tool_choice=NAMED_RESPONSE),
        "got .*look_up",
    ),
    "chat by beams": (chat(use_beam_search=True), "set n"),
    "completion by beams": (CompletionRequest(prompt="Hi", use_beam_search=True), "set n"),
}
NEEDS_A_PARSER = {
    "chat": chat(tools=[CHAT_TOOL]),
    "chat, auto": chat(tools=[CHAT_TOOL], tool_choice="auto"),
    "response": response(tools=[RESPONSE_TOOL]),
}
ADMITTED = {
    "chat": chat(),
    "chat, n": chat(n=3),
    "tools that are not to be called": chat(tools=[CHAT_TOOL], tool_choice="none"),
    "response": response(),
    "completion": CompletionRequest(prompt="Hi"),
    "completion, a key that it has not": CompletionRequest(prompt="Hi", tools=[CHAT_TOOL]),
}


@pytest.mark.parametrize("parses_tool_calls", [False, True], ids=["no parser", "parser"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, parses_tool_calls: bool) -> None:
    request, message = REFUSED[case]
    with pytest.raises(VLLMValidationError, match=message):
        check_http_request(request, parses_tool_calls=parses_tool_calls, forces_tool_calls=False)


@pytest.mark.parametrize("case", [case for case in REFUSED if "beams" not in case])
def test_calls_that_must_come_need_a_parser_that_tells_their_form(case: str) -> None:
    request, _ = REFUSED[case]
    check_http_request(request, parses_tool_calls=False, forces_tool_calls=True)


@pytest.mark.parametrize("case", NEEDS_A_PARSER)
def test_calls_need_somebody_who_looks_for_them(case: str) -> None:
    check_http_request(NEEDS_A_PARSER[case], parses_tool_calls=True, forces_tool_calls=False)
    with pytest.raises(VLLMValidationError, match="--enable-auto-tool-choice"):
        check_http_request(NEEDS_A_PARSER[case], parses_tool_calls=False, forces_tool_calls=True)


@pytest.mark.parametrize("case", ADMITTED)
def test_admitted(case: str) -> None:
    check_http_request(ADMITTED[case], parses_tool_calls=False, forces_tool_calls=False)


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
