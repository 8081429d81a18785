"""What a client may ask for over HTTP that a diffusion model cannot give, or that stands where
nobody looks for it. vLLM answers these with 200 and without what was asked for.
"""

import reprlib
from collections.abc import Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.config.extension import SECTION, ExtensionConfig
from vllm_dllm.config.names import nearest_name, normalize_name
from vllm_dllm.requests.limits import count_http_request
from vllm_dllm.requests.options import KEYS, PREFIX, own_values
from vllm_dllm.requests.prediction import take_openai_prediction

_CONTENT = frozenset(
    {
        *("messages", "prompt", "input", "instructions", "system", "documents", "metadata"),
        *("tools", "functions", "response_format", "structured_outputs", "text", "prediction"),
    }
)
"""What a user wrote; it may have any names in it."""
_ORDINARY = {"defaults", "limits", "logprobs", "prediction"}
"""Names that may be others' where ours would be misplaced."""


def check_body(body: dict[str, Any], *, parses_tool_calls: bool, forces_tool_calls: bool) -> None:
    """Checks a request for an answer, on any route, before anything is made of it. May change it.
    `parses_tool_calls`: the server looks for calls in the answers; `forces_tool_calls`: it can
    hold an answer to the form of a call.

    Raises:
        VLLMValidationError: answered with HTTP 400; says what came and what to do.
    """
    count_http_request()
    for place, name in _names(body):
        _check_place(place, name)
    if isinstance(keys := body.get("vllm_xargs"), dict):
        _check_types(keys)
    if body.get("use_beam_search"):
        refuse_beam_search()
    take_openai_prediction(body)
    # A completion has no tools; what it says under that name is as unknown as any other.
    if body.get("tools") and "prompt" not in body:
        _check_tool_choice(body.get("tool_choice"), parses_tool_calls, forces_tool_calls)


def refuse_beam_search() -> None:
    raise VLLMValidationError(
        "Beam search (use_beam_search) is not possible with a diffusion model: a beam grows token "
        "by token, a canvas is denoised whole. Leave it out; for several answers set n.",
        parameter="use_beam_search",
    )


def wrong_type(parameter: str, value: Any) -> VLLMValidationError:
    """Makes the error for a value in a body that is no object, list or string where one is
    expected."""
    return VLLMValidationError(
        f"{parameter} has another type than is expected, got {reprlib.repr(value)}. Correct it or "
        f"leave it out.",
        parameter=parameter,
    )


def _names(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The names in a body, each with the object that it is in; not those in `vllm_xargs`, which are
    checked with their values, nor what a user wrote."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if (place, name) == ("", "vllm_xargs"):
            continue
        yield place, name
        if name not in _CONTENT:
            yield from _names(inner, f"{place}.{name}" if place else name)


def _check_place(place: str, name: str) -> None:
    ours = normalize_name(name)
    if ours in _ORDINARY:
        return
    if ours == SECTION or (
        ours in ExtensionConfig.__annotations__ and f"{PREFIX}{ours}" not in KEYS
    ):
        raise VLLMValidationError(
            f"{name} is a setting of the server, got it in a request. Start the server with "
            f"--additional-config for it, or leave it out.",
            parameter=name,
        )
    key = f"{PREFIX}{ours.removeprefix(PREFIX)}"
    if ours.startswith(PREFIX):
        key = nearest_name(key, KEYS) or key
    elif key not in KEYS:
        return
    raise VLLMValidationError(
        f"{name} belongs in vllm_xargs, got it in {place or 'the body'}. Write "
        f'"vllm_xargs": {{"{key}": ...}}; with the OpenAI client, '
        f'extra_body={{"vllm_xargs": {{"{key}": ...}}}}.',
        parameter=name,
    )


def _check_types(keys: dict[str, Any]) -> None:
    """vLLM takes `true` for 1 in `vllm_xargs`, and complains of an object in a line for each type
    that it would take."""
    try:
        own_values(keys)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=str(error).split()[0]) from error


def _check_tool_choice(choice: Any, parses_tool_calls: bool, forces_tool_calls: bool) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        if forces_tool_calls:
            return
        raise VLLMValidationError(
            f"tool_choice must be 'auto' or 'none' on this server, got {choice!r}: it has no "
            "tool parser that tells the form of a call. Start it with a --tool-call-parser that "
            "does, such as gemma4_strict or, for calls in JSON, hermes, or ask for the call in the "
            "prompt.",
            parameter="tool_choice",
        )
    if kind != "none" and not parses_tool_calls:
        raise VLLMValidationError(
            "tools need a server that looks for calls in the answers, and this one does not. Start "
            "it with --enable-auto-tool-choice and --tool-call-parser, leave tools out, or set "
            "tool_choice to 'none'.",
            parameter="tools",
        )
