"""Requests as they come over HTTP, before they are sampling parameters and a prompt."""

import traceback
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dllm.compat.patching import is_server, replace


def set_http_check(
    check: Callable[..., None], check_size: Callable[[VllmConfig, Any, list[int]], None]
) -> None:
    """`check(request, parses_tool_calls=..., forces_tool_calls=...)` sees each request to a
    diffusion model for chat, completions and responses before anything is made of it, `check_size`
    chats and completions with the tokens of each of their prompts. Repeatable, and nothing in a
    process that is no server."""
    if not is_server():
        return

    def checked(render: Callable[..., Any]) -> Callable[..., Any]:
        async def render_checked(self: Any, request: Any, **kwargs: Any) -> Any:
            if self.model_config.is_diffusion:
                parser = self.parser and self.parser.tool_parser_cls
                check(
                    request,
                    parses_tool_calls=bool(parser and self.enable_auto_tools),
                    forces_tool_calls=bool(parser and _knows_the_form_of_calls(parser)),
                )
            rendered = await render(self, request, **kwargs)
            if self.model_config.is_diffusion and (lengths := prompt_lengths(rendered)):
                check_size(self.renderer.config, request, lengths)
            return rendered

        return render_checked

    def prompt_lengths(rendered: Any) -> list[int]:
        """In tokens; of what is no chat or completion, or an error, none."""
        inputs = rendered[1] if isinstance(rendered, tuple) and len(rendered) == 2 else rendered
        is_list = isinstance(inputs, list)
        return [len(one.get("prompt_token_ids") or ()) for one in inputs] if is_list else []

    for name in ("render_chat", "render_completion", "render_responses"):
        replace(f"renderers.online_renderer:OnlineRenderer.{name}", checked)


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


def answer_bad_bodies(complain: Callable[[str, Any], Exception]) -> None:
    """vLLM's checks of a body come before those of its types, and take some for granted: a number
    where they look for an object ends in HTTP 500. `complain(parameter, value)` makes the error
    that is answered instead. Repeatable, and nothing in a process that is no server."""
    if not is_server():
        return

    def make(stock: Any) -> Any:
        def init_exception_handler(app: Any) -> None:
            stock(app)
            stock_handler = app.exception_handlers[Exception]

            async def handler(request: Any, error: Exception) -> Any:
                if (found := _checked_value(error)) is not None:
                    error = complain(*found)
                return await stock_handler(request, error)

            # Starlette looks for the handler of an exception's own class first.
            for kind in (AttributeError, LookupError):
                app.exception_handler(kind)(handler)

        return init_exception_handler

    replace("entrypoints.launchers.app:init_exception_handler", make)


def _checked_value(error: Exception) -> tuple[str, Any] | None:
    """The parameter, with its value, that vLLM's check of a body failed at; None for errors from
    elsewhere. The check's code names the parameters that it looks at."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_code.co_name == "request_body_to_args" for frame in frames):
        return None
    for frame in reversed(frames):
        body = frame.f_locals.get("data")
        if isinstance(body, dict):
            looked_at = [key for key in frame.f_code.co_consts if key in body]
            for key in looked_at:
                if not isinstance(body[key], dict):
                    return key, body[key]
            return "the body", body
    return None
