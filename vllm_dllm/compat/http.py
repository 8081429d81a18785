"""Requests as they come over HTTP: what is checked before an answer begins."""

import logging
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.admission import admitted
from vllm_dllm.compat.patching import is_server, replace
from vllm_dllm.compat.usage import TokenCounter, count_http_request, counted

MESSAGES = "/v1/messages"
ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"),
        *(MESSAGES, "/v1/responses"),
    }
)
"""They answer, and have a body of JSON."""


class _MessageError(Exception):
    """A client's mistake on a route whose errors have another form than OpenAI's."""


def admit_before_streams(count_tokens: Callable[[Any, Any], TokenCounter | None]) -> None:
    """A request is admitted when its answer is asked for, not when the answer's first part is: a
    mistake then has its HTTP status. What is answered is counted for `usage`, its tokens by
    `count_tokens(params, tokenizer)`, if that makes a counter. Repeatable, and nothing in a
    process that is no server."""
    if not is_server():
        return

    def generate_of(stock: Any) -> Any:
        def generate(
            self: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any
        ) -> Any:
            prompt = admitted(self, prompt, sampling_params, request_id, options)
            results = stock(self, prompt, sampling_params, request_id, **options)
            return counted(results, lambda: count_tokens(sampling_params, self.renderer.tokenizer))

        return generate

    def respond_of(stock: Any) -> Any:
        def respond(
            self: Any,
            request_id: str,
            engine_input: Any,
            sampling_params: Any,
            *args: Any,
            **options: Any,
        ) -> Any:
            engine = self.engine_client
            prompt = admitted(engine, engine_input, sampling_params, request_id, options)
            return stock(self, request_id, prompt, sampling_params, *args, **options)

        return respond

    replace("v1.engine.async_llm:AsyncLLM.generate", generate_of)
    replace(
        "entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        respond_of,
    )
    logging.getLogger("vllm.entrypoints.anthropic.api_router").addFilter(_is_the_servers)


def _is_the_servers(record: logging.LogRecord) -> bool:
    """vLLM logs a mistake of a client of `/v1/messages` like one of the server's, with a
    traceback. The access log has its line."""
    return not (record.exc_info and isinstance(record.exc_info[1], VLLMClientError))


def check_bodies(check: Callable[..., None], complain: Callable[[str, Any], Exception]) -> None:
    """`check(body, parses_tool_calls=..., forces_tool_calls=...)` sees the JSON of each request for
    an answer of a diffusion model before vLLM makes something of it, and may change it.

    vLLM's own checks of a body come before those of its types, and take some for granted: a number
    where they look for an object ends in HTTP 500. `complain(parameter, value)` makes the error
    that is answered instead. Repeatable, and nothing in a process that is no server.
    """
    if not is_server():
        return
    from fastapi import Request
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    async def validate(raw_request: Request) -> None:
        await validate_json_request(raw_request)
        state, route = raw_request.app.state, raw_request.scope["route"]
        if route.path not in ROUTES or not state.vllm_config.model_config.is_diffusion:
            return
        count_http_request()
        # The same object that the route's parameter is made of.
        if isinstance(body := await raw_request.json(), dict):
            renderer = state.online_renderer
            parser = renderer.parser and renderer.parser.tool_parser_cls
            try:
                check(
                    body,
                    parses_tool_calls=bool(parser and renderer.enable_auto_tools),
                    forces_tool_calls=bool(parser and _knows_the_form_of_calls(parser)),
                )
            except VLLMClientError as error:
                raise (_MessageError(error) if route.path == MESSAGES else error) from error

    async def answer_message(request: Request, error: Exception) -> Any:
        from vllm.entrypoints.anthropic.api_router import translate_error_response

        return translate_error_response(create_error_response(*error.args))

    async def answer(request: Request, error: Exception) -> Any:
        if (found := await _wrong_member(request)) is not None:
            error = complain(*found)
        return await request.app.exception_handlers[Exception](request, error)

    def make(stock: Any) -> Any:
        def init_exception_handler(app: Any) -> None:
            stock(app)
            app.dependency_overrides[validate_json_request] = validate
            app.exception_handler(_MessageError)(answer_message)
            # Starlette looks for the handler of an exception's own class first.
            for kind in (AttributeError, LookupError):
                app.exception_handler(kind)(answer)

        return init_exception_handler

    replace("entrypoints.launchers.app:init_exception_handler", make)


async def _wrong_member(request: Any) -> tuple[str, Any] | None:
    """The member of the request's body, and its value, without which the checks of the route's
    parameter have nothing to say, or at least do not fail; the whole, if there is none. None: they
    do not fail."""
    kinds = get_type_hints(request.scope["route"].endpoint).values()
    model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    body = await request.json()
    if _outcome(model, body) is not _FAILS:
        return None
    members = body if isinstance(body, dict) else {}
    without = {
        name: _outcome(model, {other: members[other] for other in members if other != name})
        for name in members
    }
    for outcome in (_IS_RIGHT, _COMPLAINS):
        if outcome in without.values():
            name = next(name for name in without if without[name] is outcome)
            return name, members[name]
    return "the body", body


_IS_RIGHT, _COMPLAINS, _FAILS = "is right", "complains", "fails"


def _outcome(model: type[BaseModel], body: Any) -> str:
    """Says what the checks of `body` found."""
    try:
        model.model_validate(body)
    except (ValidationError, VLLMClientError):
        return _COMPLAINS
    except (AttributeError, LookupError):
        return _FAILS
    return _IS_RIGHT


def _knows_the_form_of_calls(parser: type) -> bool:
    """Whether structured outputs are asked for where a call must come, by vLLM or by ours."""
    return bool(
        getattr(parser, "holds_calls_to_schemas", False)
        or getattr(parser, "supports_required_and_named", False)
        or getattr(parser, "structural_tag_model", None)
    )


def set_beam_search_check(check: Callable[[], None]) -> None:
    """`check` is called when a diffusion model is to be searched by beams, offline too.
    Repeatable."""

    def make(stock: Any) -> Any:
        def resolve_watermarking(
            self: InputProcessor, params: SamplingParams | BeamSearchParams
        ) -> bool:
            if self.model_config.is_diffusion and isinstance(params, BeamSearchParams):
                check()
            return bool(stock(self, params))

        return resolve_watermarking

    replace("v1.engine.input_processor:InputProcessor.resolve_watermarking", make)
