"""HTTP requests: checks and admission before a response begins."""

import logging
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.admission import admit_prompt
from vllm_dllm.compat.patching import is_server, wrap
from vllm_dllm.compat.usage import TokenCounter, count_http_request, count_results

MESSAGES = "/v1/messages"
INVOCATIONS = "/invocations"
_RENDERED = ("/v1/chat/completions", "/v1/completions", MESSAGES, "/v1/responses")
ROUTES = {
    *(*_RENDERED, "/v1/chat/completions/batch", INVOCATIONS),
    *(f"{route}/render" for route in _RENDERED),  # with --enable-scale-out
}
"""Routes whose JSON body asks for an answer, or for the tokens that `generate` answers."""
ROUTES_WITHOUT_XARGS = {
    *("/generative_scoring", "/v1/systemone", "/v1/decisions"),
    "/inference/v1/generate",
}
"""Routes that take a JSON body without `vllm_xargs`. vLLM 0.33 added `/v1/decisions`."""
ROUTES_OF_MESSAGES = {"/tokenize", f"{MESSAGES}/count_tokens"}
"""Routes that take a chat's messages and generate no answer."""


class _MessageError(Exception):
    """A client's mistake on `/v1/messages`, whose errors have another form than OpenAI's."""


def admit_before_streams(count_tokens: Callable[[Any, Any], TokenCounter | None]) -> None:
    """Patches vLLM to admit a request when its answer is asked for, not when the first part of it
    is read. A mistake is then answered with its HTTP status. Also counts answers for `usage`.
    Repeatable. `count_tokens(params, tokenizer)` makes the counter of a request's tokens, or
    returns None."""

    @wrap("v1.engine.async_llm:AsyncLLM.generate")
    def generate(
        stock: Any, self: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> Any:
        prompt = admit_prompt(self, prompt, sampling_params, request_id, options)
        results = stock(self, prompt, sampling_params, request_id, **options)
        tokenizer = self.renderer.tokenizer
        return count_results(results, lambda: count_tokens(sampling_params, tokenizer))

    responses = "entrypoints.openai.responses.serving:OpenAIServingResponses"

    @wrap(f"{responses}._generate_with_builtin_tools")
    def respond(
        stock: Any,
        self: Any,
        request_id: str,
        engine_input: Any,
        sampling_params: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        engine = self.engine_client
        prompt = admit_prompt(engine, engine_input, sampling_params, request_id, options)
        return stock(self, request_id, prompt, sampling_params, *args, **options)

    for module in _LOGS_MISTAKES:
        logging.getLogger(f"vllm.entrypoints.{module}").addFilter(_is_server_error)


_LOGS_MISTAKES = (
    "anthropic.api_router",
    *("openai.chat_completion.serving", "openai.chat_completion.batch_serving"),
    "openai.responses.serving",
)
"""Modules of vLLM that log a client's mistake as an error."""


def _is_server_error(record: logging.LogRecord) -> bool:
    """Filters a log: whether a record is not of a client's mistake. vLLM logs those with a
    traceback on `/v1/messages`, and a model that is not served elsewhere. The access log has a line
    for them."""
    if record.msg == "Error with model %s":
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], VLLMClientError))


def check_bodies(
    check: Callable[..., None],
    check_without_xargs: Callable[[dict[str, Any]], None],
    check_messages: Callable[[Any], None],
    check_text: Callable[[bytes], None],
    complain: Callable[[str, Any], Exception],
) -> None:
    """Has `check(body, parses_tool_calls=..., forces_tool_calls=...)` see the JSON body of each
    request to a diffusion model before vLLM parses it, or `check_without_xargs(body)` on
    `ROUTES_WITHOUT_XARGS`, and `check_messages(messages)` on `ROUTES_OF_MESSAGES`. Before them
    `check_text(raw)` sees the bytes of the bodies of all routes. They may change the body, or raise
    vLLM's errors of clients. Repeatable; does nothing in a process that is no server.

    vLLM's own checks of a body come before those of its types: a number where they expect an object
    ends in HTTP 500. The error that `complain(parameter, value)` returns is answered instead.
    """
    if not is_server():
        return
    from fastapi import Depends, Request
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    async def validate(raw_request: Request) -> None:
        """Lets vLLM check the request's content type, and the checks its body. Raises an error of
        theirs; below `/v1/messages` wraps it in a _MessageError."""
        await validate_json_request(raw_request)
        state, path = raw_request.app.state, raw_request.scope["route"].path
        if not state.vllm_config.model_config.is_diffusion:
            return
        try:
            check_text(await raw_request.body())
            if path in ROUTES | ROUTES_WITHOUT_XARGS:
                count_http_request()
            elif path not in ROUTES_OF_MESSAGES:
                return
            # The same object that the route's parameter is made of.
            if not isinstance(body := await raw_request.json(), dict):
                return
            if path in ROUTES_OF_MESSAGES:
                check_messages(body.get("messages"))
            elif path in ROUTES_WITHOUT_XARGS:
                check_without_xargs(body)
            else:
                renderer = state.online_renderer
                parser = renderer.parser and renderer.parser.tool_parser_cls
                check(
                    body,
                    parses_tool_calls=bool(parser and renderer.enable_auto_tools),
                    forces_tool_calls=bool(parser and _constrains_tool_calls(parser)),
                )
        except VLLMClientError as error:
            raise (_MessageError(error) if path.startswith(MESSAGES) else error) from error

    async def validate_invocation(raw_request: Request) -> None:
        """Does what `validate` does, on `INVOCATIONS` alone."""
        if raw_request.scope["route"].path == INVOCATIONS:
            await validate(raw_request)

    async def answer_message(request: Request, error: Exception) -> Any:
        from vllm.entrypoints.anthropic.api_router import translate_error_response

        return translate_error_response(create_error_response(*error.args))

    async def answer(request: Request, error: Exception) -> Any:
        if (found := await _find_wrong_member(request)) is not None:
            error = complain(*found)
        return await request.app.exception_handlers[Exception](request, error)

    @wrap("entrypoints.launchers.app:init_exception_handler")
    def init_exception_handler(stock: Any, app: Any) -> None:
        stock(app)
        app.dependency_overrides[validate_json_request] = validate
        # Routes that are added later: SageMaker's, which replaces vLLM's route without its checks.
        app.router.dependencies.append(Depends(validate_invocation))
        app.exception_handler(_MessageError)(answer_message)
        # Starlette looks for the handler of an exception's own class first.
        for kind in _CRASHES_WITH:
            app.exception_handler(kind)(answer)


async def _find_wrong_member(request: Any) -> tuple[str, Any] | None:
    """Returns the name and value of the member of the request's body that makes its validation
    crash: without it, the rest is valid or, if no member has a valid rest, is refused in order.
    Returns ("the body", body) if there is no such member, and None if validation does not crash or
    the body is no JSON."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    kinds = get_type_hints(request.scope["route"].endpoint).values()
    models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    model = next(models, ChatCompletionRequest)  # which /invocations tries first
    try:
        body = await request.json()
    except (ValueError, RuntimeError):  # it is no JSON, or was read as a form
        return None
    if _validate(model, body) is not _CRASHES:
        return None
    members = body if isinstance(body, dict) else {}
    by_outcome: dict[str, str] = {}  # outcome without a member -> the first such member
    for name in members:
        rest = {other: value for other, value in members.items() if other != name}
        by_outcome.setdefault(_validate(model, rest), name)
    for outcome in (_IS_VALID, _IS_REFUSED):
        if outcome in by_outcome:
            return by_outcome[outcome], members[by_outcome[outcome]]
    return "the body", body


_IS_VALID, _IS_REFUSED, _CRASHES = "is valid", "is refused", "crashes"
_CRASHES_WITH = (AttributeError, LookupError, TypeError)


def _validate(model: type[BaseModel], body: Any) -> str:
    """Returns `_IS_VALID`, `_IS_REFUSED` or `_CRASHES`: what validating `body` as `model` does."""
    try:
        model.model_validate(body)
    except (ValidationError, VLLMClientError):
        return _IS_REFUSED
    except _CRASHES_WITH:
        return _CRASHES
    return _IS_VALID


def _constrains_tool_calls(parser: type) -> bool:
    """Whether vLLM or we constrain an answer by a grammar where `tool_choice` demands a call.
    `parser`: the class of the server's tool parser."""
    return bool(
        getattr(parser, "holds_calls_to_schemas", False)
        or getattr(parser, "supports_required_and_named", False)
        or getattr(parser, "structural_tag_model", None)
    )


def set_beam_search_check(check: Callable[[], None]) -> None:
    """Has `check()`, which may raise, called when a diffusion model is asked for beam search, also
    offline. Patches a method that vLLM calls with the parameters of a beam search. Repeatable."""

    @wrap("v1.engine.input_processor:InputProcessor.resolve_watermarking")
    def resolve_watermarking(
        stock: Any, self: InputProcessor, params: SamplingParams | BeamSearchParams
    ) -> bool:
        if self.model_config.is_diffusion and isinstance(params, BeamSearchParams):
            check()
        return bool(stock(self, params))
