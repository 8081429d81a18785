"""Refuses HTTP requests that ask for what a diffusion model cannot do, or have a key in the wrong
place. vLLM would answer them with 200 and ignore the key."""

import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_dllm.config.checks import nearest_name, normalize_name
from vllm_dllm.config.extension import SECTION, ExtensionConfig
from vllm_dllm.requests.limits import begin_http_request, refusal
from vllm_dllm.requests.options import KEYS, OTHER_NAMES, PREFIX, parse_values
from vllm_dllm.requests.prediction import move_openai_prediction

_CONTENT_NAMES = frozenset(
    {
        *("messages", "prompt", "input", "instructions", "system", "documents", "metadata"),
        *("tools", "functions", "response_format", "structured_outputs", "text", "prediction"),
        *("tool_choice", "output_config", "previous_input_messages"),
        *("state", "questions", "query", "items"),
    }
)
"""Fields with a user's own content, or a standard's names that are also ours. Names inside of them
are not checked."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Half of a surrogate pair in JSON, or one of both halves."""
_COMMON_NAMES = {"defaults", "limits", "logprobs", "prediction"}
"""Names of our settings and keys that other software uses as well. Outside of vllm_xargs they are
not taken for misplaced keys."""
_MISTYPED = [
    f"{PREFIX[:i]}{rest}"
    for i in range(len(PREFIX))
    for rest in (
        f".?{PREFIX[i + 1 :]}",
        f".{PREFIX[i:]}",
        PREFIX[i : i + 2][::-1] + PREFIX[i + 2 :],
    )
]
"""Patterns of the prefix of our keys with a letter left out, replaced, added or swapped."""
_MISTYPED_KEY = re.compile(
    f"(?:{'|'.join(_MISTYPED)})_?({'|'.join(key.removeprefix(PREFIX) for key in KEYS)})"
)


def check_request_body(
    body: dict[str, Any], *, parses_tool_calls: bool, forces_tool_calls: bool
) -> None:
    """Checks the body of a request for an answer, on any route, before vLLM reads it. Starts the
    sums of `limits.begin_http_request`. Copies OpenAI's `prediction` to our key, in place.
    `parses_tool_calls`: the server looks for calls in the answers. `forces_tool_calls`: it can
    constrain an answer to a call. Raises VLLMValidationError, which is answered with HTTP 400; it
    says what came and what to do."""
    begin_http_request()
    for place, name in _names_in_body(body):
        if (key := _find_key(name)) is not None:
            raise VLLMValidationError(
                f"{name} belongs in vllm_xargs, got it in {_describe(place)}. Write "
                f'"vllm_xargs": {{"{key}": ...}}; with the OpenAI client, '
                f'extra_body={{"vllm_xargs": {{"{key}": ...}}}}.',
                parameter=name,
            )
    if isinstance(keys := body.get("vllm_xargs"), dict):
        _check_xargs(keys)
    check_messages(body.get("messages"))
    if body.get("use_beam_search"):
        refuse_beam_search()
    move_openai_prediction(body)
    # Completions have no tools: vLLM ignores that name in them.
    if body.get("tools") and "prompt" not in body:
        _check_tool_choice(body.get("tool_choice"), parses_tool_calls, forces_tool_calls)


def check_body_without_xargs(body: dict[str, Any]) -> None:
    """Checks the body of a request on a route without `vllm_xargs`, before vLLM reads it: one for
    scores, or of tokens, whose `sampling_params` may have keys in `extra_args`. Begins an HTTP
    request for `limits`, whose prompts do not add up: a score is not an answer. Raises
    VLLMValidationError, which is answered with HTTP 400; it says what came and what to do."""
    begin_http_request(adds_up=False)
    names = (
        (name, _describe(place))
        for place, name in _names_in_body(body)
        if place != _EXTRA_ARGS and _find_key(name) is not None
    )
    name, place = next(names, (None, _describe(None)))
    if name is None and "vllm_xargs" in body:
        name = "vllm_xargs"
    if name is not None:
        own_place = "Put it into sampling_params.extra_args"
        remedy = own_place if "sampling_params" in body else "Leave it out"
        raise VLLMValidationError(
            f"{name} has no effect in {place} on this route. {remedy}.", parameter=name
        )


def check_messages(messages: Any) -> None:
    """Raises VLLMValidationError for a part of a chat's messages that vLLM would take for another
    type than it has, and answer with HTTP 500."""
    values = [messages]
    for value in values:  # which grows
        if isinstance(value, list):
            values += value
        if not isinstance(value, dict):
            continue
        if value.get("image_pil") is not None:
            raise refusal(
                "image_pil is for programs that call vLLM in Python, got it in a request. Send "
                'the image as {"type": "image_url", "image_url": {"url": "data:image/png;base64,'
                '…"}}.'
            )
        name, inner = "input_audio", value.get("input_audio") or {}
        if value.get("type") == "image":
            name, inner = "source", value.get("source", {})  # vLLM reads an empty one, too
        if not isinstance(inner, dict):
            raise wrong_type_error(name, inner)
        values.append(value.get("content"))


def check_text(raw: bytes) -> None:
    """Raises VLLMValidationError if a text in `raw`, a request's body, has half of a surrogate
    pair, which JSON can write but no tokenizer can read. Leaves what is not JSON to the route."""
    if not _SURROGATE.search(raw):
        return
    try:
        json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[max(0, error.start - 20) : error.end]
        raise VLLMValidationError(
            f"The body must be valid Unicode, got half of a character (a lone surrogate) at the "
            f"end of {part!r}. Send the whole character, or leave it out."
        ) from None
    except ValueError:
        return  # not JSON: the route answers that


def refuse_beam_search() -> None:
    """Always raises VLLMValidationError: a diffusion model has no beam search."""
    raise VLLMValidationError(
        "Beam search (use_beam_search) is not possible with a diffusion model: a beam grows token "
        "by token, a canvas is denoised whole. Leave it out; for several answers set n.",
        parameter="use_beam_search",
    )


def wrong_type_error(parameter: str, value: Any) -> VLLMValidationError:
    """Returns, not raises, the error for a parameter of a body whose value has a wrong type."""
    return VLLMValidationError(
        f"{parameter} has another type than is expected, got {reprlib.repr(value)}. Correct it or "
        f"leave it out.",
        parameter=parameter,
    )


_Place = tuple[Any, str] | None
"""Where an object is in a body: the place of the object around it, and its name there. None: the
body. A path as text would be copied for each name below it."""
_EXTRA_ARGS: _Place = ((None, "sampling_params"), "extra_args")


def _describe(place: _Place) -> str:
    """Returns a place in words."""
    names = []
    while place is not None:
        place, name = place
        names.append(name)
    return ".".join(reversed(names)) or "the body"


def _names_in_body(body: dict[str, Any]) -> Iterator[tuple[_Place, str]]:
    """Yields for each name in a body the place of the object that has it, and the name. Leaves out
    names in `vllm_xargs`, which `_check_xargs` checks, and names inside of a user's content."""
    values: list[tuple[_Place, Any]] = [(None, body)]
    for place, value in values:  # which grows
        if isinstance(value, list):
            values += [(place, entry) for entry in value if isinstance(entry, dict | list)]
        for name, inner in value.items() if isinstance(value, dict) else ():
            if (place, name) == (None, "vllm_xargs"):
                continue
            yield place, name
            if name not in _CONTENT_NAMES and isinstance(inner, dict | list):
                values.append(((place, name), inner))


def _find_key(name: str) -> str | None:
    """Returns the key of a request that a name outside of `vllm_xargs` is, or nearly is; None if it
    is none. Raises VLLMValidationError if it is a setting of ours."""
    ours = normalize_name(name)
    ours = OTHER_NAMES.get(ours, ours)
    if ours in _COMMON_NAMES:
        return None
    if ours in (SECTION, "diffusion_config") or (
        ours in ExtensionConfig.__annotations__ and f"{PREFIX}{ours}" not in KEYS
    ):
        option = "diffusion" if ours == "diffusion_config" else "additional"
        raise VLLMValidationError(
            f"{name} is a setting of the server, got it in a request. Start the server with "
            f"--{option}-config for it, or leave it out.",
            parameter=name,
        )
    if ours.startswith(PREFIX):
        return nearest_name(ours, KEYS) or ours
    if found := _MISTYPED_KEY.fullmatch(ours):
        ours = found[1]
    key = f"{PREFIX}{ours}"
    return key if key in KEYS else None


def _check_xargs(keys: dict[str, Any]) -> None:
    """Raises VLLMValidationError if a key in `vllm_xargs` has a value of the wrong type or out of
    range. vLLM itself would read `true` as 1, and would answer to an object with one line for each
    type that it expects."""
    try:
        parse_values(keys)
    except ValueError as error:
        raise refusal(str(error)) from error


def _check_tool_choice(choice: Any, parses_tool_calls: bool, forces_tool_calls: bool) -> None:
    """Raises VLLMValidationError if the request's tools or `tool_choice` need another tool parser
    than the server's. The flags are those of `check_request_body`."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        if forces_tool_calls:
            return
        raise refusal(
            f"tool_choice must be 'auto' or 'none' on this server, got {choice!r}: it has no "
            "tool parser that tells the form of a call. Start it with a --tool-call-parser that "
            "does, such as gemma4_strict or, for calls in JSON, hermes, or ask for the call in the "
            "prompt."
        )
    if kind != "none" and not parses_tool_calls:
        raise refusal(
            "tools need a server that looks for calls in the answers, and this one does not. Start "
            "it with --enable-auto-tool-choice and --tool-call-parser, leave tools out, or set "
            "tool_choice to 'none'."
        )
