"""The `diffusion_*` keys of a request (`vllm_xargs`, offline `SamplingParams.extra_args`) that a
server may have a default for, and what each accepts. The others are `CHECKED_ELSEWHERE`.

A server's defaults are `--additional-config '{"vllm_dllm": {"defaults": {...}}}'`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dllm.config.denoise import (
    HIGHEST_TEMPERATURE,
    LOWEST_MAXIMUM,
    MOST_NATS,
    MOST_STEPS,
)
from vllm_dllm.config.extension import WINDOW_RULES

ACCEPTANCE_RULES = ("entropy_bound", "confidence", "top_k", "in_order")
STOCK_OPTIONS = frozenset(
    {
        "diffusion_canvas_length",
        "diffusion_constrained",
        "diffusion_max_steps",
        "diffusion_pinned",
        "diffusion_read_only",
        "diffusion_seed_canvas",
    }
)
"""Keys that stock vLLM checks in requests."""
PREDICTION = "diffusion_prediction"
STREAM_CANVASES = "diffusion_stream_canvases"
"""Served by the API process (`vllm_dllm.canvases`), which takes it out of the requests that it
serves. The engine sees it only where nobody does."""
CHECKED_ELSEWHERE = STOCK_OPTIONS | {PREDICTION, STREAM_CANVASES}  # and never a server's default
WATCHING_PLUGINS = "VLLM_PLUGINS=vllm_dllm,vllm_dllm_canvas"


@dataclass(frozen=True)
class Option:
    """The values a key accepts."""

    expected: str  # completes "must be"
    accepts: Callable[[Any], bool]


def _number(at_most: float, above: float = -math.inf, at_least: float = -math.inf) -> Option:
    def accepts(value: Any) -> bool:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and above < value <= at_most
            and value >= at_least
            and math.isfinite(value)
        )

    lower = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}"
    return Option(f"a number{lower} and <= {at_most:g}", accepts)


def _integer(at_least: int) -> Option:
    return Option(
        f"an integer from {at_least} to {MOST_STEPS}",
        lambda value: (
            isinstance(value, int)
            and not isinstance(value, bool)
            and at_least <= value <= MOST_STEPS
        ),
    )


def _one_of(names: tuple[str, ...]) -> Option:
    return Option(f"one of {list(names)}", lambda value: value in names)


# JSON booleans arrive as 0 and 1 in vllm_xargs.
_BOOLEAN = Option("a boolean (or 0/1)", lambda value: isinstance(value, int) and value in (0, 1))

OPTIONS: Mapping[str, Option] = {
    "diffusion_max_steps": _integer(1),
    "diffusion_acceptance": _one_of(ACCEPTANCE_RULES),
    "diffusion_entropy_bound": _number(above=0, at_most=MOST_NATS),  # nats
    "diffusion_accept_probability": _number(above=0, at_most=1),
    "diffusion_accept_tokens": _integer(1),  # per step
    "diffusion_edit_probability": _number(above=0, at_most=1),
    "diffusion_edit_steps": _integer(1),
    "diffusion_confidence_threshold": _number(above=0, at_most=MOST_NATS),  # nats
    "diffusion_stability_threshold": _integer(0),  # steps
    "diffusion_t_min": _number(at_least=LOWEST_MAXIMUM, at_most=HIGHEST_TEMPERATURE),
    "diffusion_t_max": _number(at_least=LOWEST_MAXIMUM, at_most=HIGHEST_TEMPERATURE),
    "diffusion_judge_answer_only": _BOOLEAN,
    "diffusion_load_stages": _integer(0),
    "diffusion_window_rule": _one_of(WINDOW_RULES),
}


def check_options(given: Mapping[str, Any], known: frozenset[str] = CHECKED_ELSEWHERE) -> None:
    """Raises ValueError for an unknown key or a value out of range. Keys in `known` are checked
    elsewhere."""
    for key, value in given.items():
        if key in known or value is None:
            continue
        option = OPTIONS.get(key)
        if option is None:
            names = sorted(OPTIONS.keys() | known)
            raise ValueError(f"{key} is not known. Known are: {', '.join(names)}.")
        if not option.accepts(value):
            raise ValueError(f"{key} must be {option.expected}, got {value!r}.")
    t_min, t_max = given.get("diffusion_t_min"), given.get("diffusion_t_max")
    if (t_min is None) != (t_max is None):
        raise ValueError(
            f"diffusion_t_min and diffusion_t_max come together, got {t_min!r} and {t_max!r}."
        )
    if t_min is not None and t_max is not None and t_min > t_max:
        raise ValueError(
            f"diffusion_t_min must be at most diffusion_t_max, got {t_min!r} and {t_max!r}."
        )


def check_stream_canvases(value: Any) -> None:
    """Raises ValueError for a request that reached the engine and wants its canvases."""
    if value is None:
        return
    if not _BOOLEAN.accepts(value):
        raise ValueError(f"{STREAM_CANVASES} must be {_BOOLEAN.expected}, got {value!r}.")
    if value:
        raise ValueError(
            f"{STREAM_CANVASES} is for streams of /v1/completions and /v1/chat/completions, on "
            f"a server that was started with {WATCHING_PLUGINS} in its environment. Leave it out "
            f"elsewhere."
        )
