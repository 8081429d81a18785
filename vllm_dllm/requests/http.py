"""What a client may ask for over HTTP that a diffusion model cannot give.

vLLM answers these with 200 and without what was asked for.
"""

import reprlib
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.requests.prediction import take_openai_prediction


def check_http_request(request: Any, *, parses_tool_calls: bool, forces_tool_calls: bool) -> None:
    """Of a chat, a completion or a response. `parses_tool_calls`: the server looks for calls in the
    answers; `forces_tool_calls`: it can hold an answer to the form of a call.

    Raises:
        VLLMValidationError: answered with HTTP 400; says what came and what to do.
    """
    if getattr(request, "use_beam_search", False):
        refuse_beam_search()
    take_openai_prediction(request)
    # A completion has no tools; what it says under that name is as unknown as any other.
    if getattr(request, "tools", None) and hasattr(request, "tool_choice"):
        _check_tool_choice(request, parses_tool_calls, forces_tool_calls)


def refuse_beam_search() -> None:
    raise VLLMValidationError(
        "Beam search (use_beam_search) is not possible with a diffusion model: a beam grows token "
        "by token, a canvas is denoised whole. Leave it out; for several answers set n.",
        parameter="use_beam_search",
    )


def wrong_type(parameter: str, value: Any) -> VLLMValidationError:
    """Of a value in a body that is no object, list or string where one is expected."""
    return VLLMValidationError(
        f"{parameter} has another type than is expected, got {reprlib.repr(value)}. Correct it or "
        f"leave it out.",
        parameter=parameter,
    )


def _check_tool_choice(request: Any, parses_tool_calls: bool, forces_tool_calls: bool) -> None:
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        if forces_tool_calls:
            return
        name = choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)
        raise VLLMValidationError(
            f"tool_choice must be 'auto' or 'none' on this server, got {name!r}: it has no "
            "tool parser that tells the form of a call. Start it with a --tool-call-parser that "
            "does, such as gemma4_strict or, for calls in JSON, hermes, or ask for the call in the "
            "prompt.",
            parameter="tool_choice",
        )
    if choice != "none" and not parses_tool_calls:
        raise VLLMValidationError(
            "tools need a server that looks for calls in the answers, and this one does not. Start "
            "it with --enable-auto-tool-choice and --tool-call-parser, leave tools out, or set "
            "tool_choice to 'none'.",
            parameter="tools",
        )
