"""Whether an answer keeps what its request asked for."""

import json
import math
from collections.abc import Iterator
from typing import Any

from tests.faults.drawn_requests import DrawnRequest, Model

TEXTS = {"stop", "prompt", "messages", "model"}
"""Keys whose values are no numbers, whatever they look like."""
ROUNDING = 1e-3
"""Above 0, of a log-probability."""


class Broken(AssertionError):
    """An answer that breaks its request, or none."""


def check(request: DrawnRequest, status: int, text: str, model: Model, tokenizer: Any) -> None:
    """Raises Broken. `tokenizer`: of the `tokenizers` library."""
    if status >= 500:
        raise Broken(f"HTTP {status}: {text[:500]}")
    if status != 200:
        error = json.loads(text).get("error") or {}
        if not error.get("message"):
            raise Broken(f"HTTP {status} without a message: {text[:500]}")
        return
    if request.is_bad:
        raise Broken(f"a picture that is none was answered: {text[:500]}")
    if request.body.get("stream"):
        check_stream(text)
        return
    answer = json.loads(text, parse_constant=_no_number)
    body = {
        key: value if key in TEXTS else as_read(value)
        for key, value in request.body.items()
        if value is not None
    }
    choices = answer["choices"]
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and isinstance(prompts[0], (list, str))
    wanted = int(body.get("n", 1)) * (len(prompts) if several else 1)
    if len(choices) != wanted:
        raise Broken(f"{len(choices)} answers instead of {wanted}")
    tokens = [choice["token_ids"] for choice in choices]
    if answer["usage"]["completion_tokens"] != sum(map(len, tokens)):
        raise Broken(f"usage {answer['usage']} of {sum(map(len, tokens))} tokens")
    for choice in choices:
        for complaint in complaints(body, choice, model, tokenizer):
            raise Broken(f"{complaint}: {str(choice)[:500]}")


def as_read(value: Any) -> Any:
    """Of a parameter; servers take numbers in quotation marks, and -0.0, for whole numbers."""
    is_whole = value == "5" or isinstance(value, bool) or (isinstance(value, float) and not value)
    return int(value) if is_whole else value


def _no_number(name: str) -> float:
    raise Broken(f"{name} in an answer")


def check_stream(text: str) -> None:
    """Pieces are JSON, none is an error, and the last says that it is."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    if not events or events[-1] != "[DONE]":
        raise Broken(f"a stream without an end: {text[-300:]}")
    for event in events[:-1]:
        error = json.loads(event, parse_constant=_no_number).get("error")
        if error and int(error.get("code") or 500) >= 500:
            raise Broken(f"a stream ends with {error}")


def complaints(
    body: dict[str, Any], choice: dict[str, Any], model: Model, tokenizer: Any
) -> Iterator[str]:
    tokens, is_chat = choice["token_ids"], "message" in choice
    limit = body.get("max_tokens", model.context if is_chat else 16)
    if is_chat:
        limit = body.get("max_completion_tokens", limit)
    extra = body.get("vllm_xargs") or {}
    if len(tokens) > limit:
        yield f"{len(tokens)} tokens, max_tokens is {limit}"
    if choice["finish_reason"] not in ("stop", "length"):
        yield f"it ended by {choice['finish_reason']}"
    allowed = body.get("allowed_token_ids")
    if extra.get("diffusion_constrained"):
        allowed = body.get("logprob_token_ids")
    if allowed and not set(tokens) <= set(allowed):
        yield f"tokens that are not allowed ({allowed})"
    for word in body.get("bad_words", ()) if not allowed else ():
        if holds(tokens, tokenizer.encode(word.lstrip(), add_special_tokens=False).ids):
            yield f"the bad word {word!r}"
    if not extra.get("diffusion_read_only"):
        yield from complaints_of_stops(body, choice, model)
    prompt_scores = choice.get("prompt_logprobs")
    prompt_len = len(choice.get("prompt_token_ids") or ())
    if "prompt_logprobs" in body and not is_chat and len(prompt_scores or ()) != prompt_len:
        yield f"prompt_logprobs {prompt_scores} of {prompt_len} tokens"
    yield from complaints_of_scores(body, choice)


def complaints_of_stops(
    body: dict[str, Any], choice: dict[str, Any], model: Model
) -> Iterator[str]:
    tokens, at_least = choice["token_ids"], body.get("min_tokens", 0)
    stops = {*body.get("stop_token_ids", ()), model.eos}
    if stops & set(tokens[:at_least]):
        yield f"a stop token among the first {at_least}"
    if len(tokens) < at_least and choice["finish_reason"] != "length":  # but where a context ends
        yield f"{len(tokens)} tokens, min_tokens is {at_least}"
    ends = stops - ({model.eos} if body.get("ignore_eos") else set())
    ends |= set(body.get("stop_token_ids", ()))
    if ends & set(tokens[at_least:-1]):
        yield "tokens behind a stop token"
    stop = body.get("stop") or []
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    echoes = body.get("echo") and "text" in choice
    if not (at_least or body.get("include_stop_str_in_output") or echoes):
        for string in [stop] if isinstance(stop, str) else stop:
            if string in (text or ""):
                yield f"the stop string {string!r}"


def complaints_of_scores(body: dict[str, Any], choice: dict[str, Any]) -> Iterator[str]:
    scores, tokens = choice.get("logprobs"), choice["token_ids"]
    if body.get("logprobs") is None or (body["logprobs"] == 0 and "message" in choice):
        return
    if scores is None:
        yield "no log-probabilities"
        return
    if "content" in scores:  # of a chat
        found = [entry["logprob"] for entry in scores["content"] or ()]
        most = body.get("top_logprobs", 0)
        widths = [len(entry["top_logprobs"]) for entry in scores["content"] or ()]
    else:
        found = scores["token_logprobs"]
        most = body["logprobs"] + 1
        widths = [len(entry) for entry in scores["top_logprobs"] if entry is not None]
    if "logprob_token_ids" in body:
        most = len(body["logprob_token_ids"]) + 1
    length = len(tokens)
    if body.get("echo") and "text" in choice:
        length += len(choice.get("prompt_token_ids") or ())
        found = found[1:] if found and found[0] is None else found
        length -= 1
    if len(found) != length:
        yield f"{len(found)} log-probabilities of {length} tokens"
    if any(score is None or not math.isfinite(score) or score > ROUNDING for score in found):
        yield f"log-probabilities {found}"
    if any(width > most for width in widths):
        yield f"more than {most} likely tokens"


def holds(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens) - len(word) + 1))
