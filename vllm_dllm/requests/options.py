"""What a request asks of a diffusion model: checked at admission, read by the worker.

docs/requests.md says what the keys of `vllm_xargs` (`SamplingParams.extra_args`) mean.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.diffusion import validate_diffusion_sampling_params

from vllm_dllm.config.canvas_feeds import FEED
from vllm_dllm.grammar.reasoning import Reasoning
from vllm_dllm.requests.keys import STREAM_CANVASES, check_options, check_stream_canvases
from vllm_dllm.requests.prediction import check_prediction

DEFAULT_ACCEPT_PROBABILITY = 0.9
DEFAULT_EDIT_STEPS = 16  # LLaDA2.1's
JOINS_COMMITS = "vllm_dllm_joins_commits"
FITS_CANVASES = "vllm_dllm_fits_canvases"
IS_COUNTED = "vllm_dllm_is_counted"
REASONING = "vllm_dllm_reasoning"
WIDTH_STEP = 16  # tokens: few different widths, and a little room after the last token


@dataclass(frozen=True)
class RequestOptions:
    """The options of one admitted request, already checked. None: the server's setting."""

    max_steps: int | None
    canvas_length: int | None
    first_canvas: list[int] | None
    prediction: list[int]  # none: empty
    pinned: list[int]
    read_only: bool
    constrained: bool
    window_rule: str | None
    acceptance: str
    entropy_bound: float | None
    accept_probability: float
    accept_tokens: int | None
    edit_probability: float | None
    edit_steps: int
    confidence_threshold: float | None
    stability_threshold: int | None
    t_min: float | None
    t_max: float | None
    judge_answer_only: bool
    load_stages: int
    joins_commits: bool
    fits_canvases: bool
    is_counted: bool  # for the metrics
    reasoning: Reasoning | None  # that comes before the form of the answer
    canvas_feed: str | None  # where the API process waits for this request's canvases

    @classmethod
    def from_sampling_params(
        cls, params: SamplingParams, defaults: Mapping[str, Any]
    ) -> "RequestOptions":
        """`defaults`: the server's values for keys that the request leaves out."""
        own = params.extra_args or {}
        extra: dict[str, Any] = {}
        for source in (defaults, own):
            extra |= {key: value for key, value in source.items() if value is not None}

        def get(name: str, default: Any = None) -> Any:
            return extra.get(f"diffusion_{name}", default)

        return cls(
            max_steps=get("max_steps"),
            canvas_length=get("canvas_length"),
            first_canvas=get("seed_canvas"),
            prediction=list(get("prediction", ())),
            pinned=list(get("pinned", ())),
            read_only=is_read_only(params),
            constrained=bool(get("constrained")),
            window_rule=get("window_rule"),
            acceptance=get("acceptance", "entropy_bound"),
            entropy_bound=get("entropy_bound"),
            accept_probability=get("accept_probability", DEFAULT_ACCEPT_PROBABILITY),
            accept_tokens=get("accept_tokens"),
            edit_probability=get("edit_probability"),
            edit_steps=get("edit_steps", DEFAULT_EDIT_STEPS),
            confidence_threshold=get("confidence_threshold"),
            stability_threshold=get("stability_threshold"),
            t_min=get("t_min"),
            t_max=get("t_max"),
            judge_answer_only=bool(get("judge_answer_only", bool(get("prediction")))),
            load_stages=get("load_stages", 0),
            joins_commits=bool(own.get(JOINS_COMMITS)),
            fits_canvases=bool(own.get(FITS_CANVASES)),
            is_counted=bool(own.get(IS_COUNTED)),
            reasoning=None if (ends := own.get(REASONING)) is None else reasoning_of(ends),
            canvas_feed=feed if isinstance(feed := own.get(FEED), str) else None,
        )


def is_read_only(params: SamplingParams | None) -> bool:
    """Whether a request emits its first canvas without a commit and then ends."""
    return bool(params is not None and (params.extra_args or {}).get("diffusion_read_only"))


def fitted_width(num_tokens: Any) -> Any:
    """Width of a canvas for this many tokens that may still come; a number or a tensor."""
    return (num_tokens + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP


def fit_canvas(params: SamplingParams | None, canvas_length: int) -> bool:
    """Narrows the canvas of a request that may get fewer tokens than it holds. Returns whether
    later canvases may be narrowed too: not if the request names a width or a canvas."""
    if params is None or params.max_tokens is None or is_read_only(params):
        return False
    extra = params.extra_args or {}
    if extra.get("diffusion_canvas_length") or extra.get("diffusion_seed_canvas"):
        return False
    width = fitted_width(params.max_tokens)
    if width < canvas_length:
        params.extra_args = {**extra, "diffusion_canvas_length": width}
    return True


def reasoning_of(ends: Iterable[Iterable[int]]) -> Reasoning:
    """Of its fields."""
    return Reasoning(*map(frozenset, ends))


def mark(
    params: SamplingParams | None,
    *,
    joins_commits: bool,
    fits_canvases: bool,
    is_counted: bool,
    reasoning: Iterable[Iterable[int]] | None = None,  # see `reasoning_of`
) -> None:
    """Tells the worker whether the scheduler commits this request's blocks next to their
    successors, whether it fits canvases to the tokens that may still come, whether the metrics
    count them, and what ends the reasoning before an answer that has a form. Overwrites what the
    request itself says under these keys."""
    if params is not None:
        marks = {
            JOINS_COMMITS: joins_commits,
            FITS_CANVASES: fits_canvases,
            IS_COUNTED: is_counted,
            REASONING: None if reasoning is None else [sorted(ends) for ends in reasoning],
        }
        params.extra_args = {**(params.extra_args or {}), **marks}


def fits_canvases(params: SamplingParams | None) -> bool:
    return bool(params is not None and (params.extra_args or {}).get(FITS_CANVASES))


def _culprits(key: str, value: Any, canvas_length: int | None, vocab_size: int) -> str:
    """`value` in short; for a list, the entries that are out of range, if any are."""
    limits = {"diffusion_seed_canvas": vocab_size, "diffusion_pinned": canvas_length}
    limit = limits.get(key)
    if limit is not None and isinstance(value, (list, tuple)):
        wrong = [v for v in value if not isinstance(v, int) or not 0 <= v < limit]
        if wrong:
            return f"[..., {', '.join(map(repr, wrong[:3]))}, ...]"
        return f"a list of {len(value)}"
    return reprlib.repr(value)


def check_request(params: SamplingParams, *, canvas_length: int | None, vocab_size: int) -> None:
    """Admission check: vLLM's own, then ours. May change `params` (read-only requests).

    Raises:
        VLLMValidationError: becomes HTTP 400; names the key, what was expected and what came.
    """
    extra: dict[str, Any] = params.extra_args or {}
    try:
        validate_diffusion_sampling_params(
            params, canvas_length=canvas_length, vocab_size=vocab_size
        )
    except VLLMValidationError as error:
        message = error.args[0]
        key = message.split()[0]
        raise VLLMValidationError(
            f"{message} Got {key} = {_culprits(key, extra.get(key), canvas_length, vocab_size)}; "
            f"the served canvas has {canvas_length} tokens, the vocabulary {vocab_size}. Correct "
            f"the value in vllm_xargs (extra_args offline) or leave it out.",
            parameter="extra_args",
        ) from error
    _check_one_canvas(params)
    try:
        check_options({k: v for k, v in extra.items() if k.startswith("diffusion_")})
        check_prediction(extra, vocab_size)
        check_stream_canvases(extra.get(STREAM_CANVASES))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error


def _check_one_canvas(params: SamplingParams) -> None:
    """vLLM has cut a read-only request's `max_tokens` to its canvas. With more `min_tokens` than
    that, the engine's thread that reads requests would fail to decode it, and end."""
    if is_read_only(params) and params.min_tokens > (params.max_tokens or math.inf):
        raise VLLMValidationError(
            f"min_tokens must be at most {params.max_tokens}, the canvas of this request with "
            f"diffusion_read_only, got {params.min_tokens}. Lower it or leave it out.",
            parameter="min_tokens",
        )


def check_choices(params: SamplingParams) -> None:
    """Admission check of the tokens that a request may choose among.

    Raises:
        VLLMValidationError: becomes HTTP 400; `bad_words` or `min_tokens` exclude them all.
    """
    key, allowed = "allowed_token_ids", set(params.allowed_token_ids or ())
    if (params.extra_args or {}).get("diffusion_constrained"):
        key, allowed = "logprob_token_ids", set(params.logprob_token_ids or ())
    if not allowed:
        return
    culprits = []
    left = allowed - {word[0] for word in params.bad_words_token_ids or [] if len(word) == 1}
    if left != allowed:
        culprits.append("bad_words")
    if params.min_tokens > 0 and not left.isdisjoint(params.all_stop_token_ids):
        left -= params.all_stop_token_ids
        culprits.append("min_tokens")
    if not left:
        raise VLLMValidationError(
            f"{key} must leave a token that {' and '.join(culprits)} do not exclude, got "
            f"{reprlib.repr(sorted(allowed))} with "
            + " and ".join(f"{name} = {getattr(params, name)!r}" for name in culprits)
            + ". Allow another token, or leave out one of them.",
            parameter=key,
        )
