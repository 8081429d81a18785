"""What a request asks of a diffusion model beside vLLM's sampling parameters.

A field of `RequestOptions` that is an `Asked` one is a key of a request: `vllm_xargs`, offline
`SamplingParams.extra_args`, has it with `diffusion_` before its name. docs/requests.md says what
each means. One `RequestOptions` is made of each request (`requests.admission`), travels with its
parameters, and is what the scheduler and the worker read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Strict
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.architectures import Family
from vllm_dllm.config.checks import Boolean, Integer, Number, parse_settings, settings
from vllm_dllm.config.denoise import HIGHEST_TEMPERATURE, LOWEST_MAXIMUM, MOST_STEPS, Nats
from vllm_dllm.config.extension import WindowRule
from vllm_dllm.config.names import describe_unknown_name, normalize_name

PREFIX = "diffusion_"
STREAM_CANVASES = f"{PREFIX}stream_canvases"
"""Served by the API process (`vllm_dllm.canvases`), which takes it out of the requests that it
serves. The engine sees it only where nobody does."""
PREDICTION = f"{PREFIX}prediction"
WATCHING_PLUGINS = "VLLM_PLUGINS=vllm_dllm,vllm_dllm_canvas"
MASKED_ENTROPY_BOUND = 0.35  # nats, SDAR's
CARRIED = "vllm_dllm"
"""Where `extra_args` has a request's options, once it is admitted."""
_READ_BY_VLLM = {f"{PREFIX}{name}" for name in ("canvas_length", "max_steps", "read_only")}
"""Keys that its schedulers look at."""
WIDTH_STEP = 16  # tokens: few different widths, and a little room after the last token


@dataclass(frozen=True)
class Asked:
    """Marks a field that a request may ask for."""

    by_server: bool = False
    """A server may have a default for it: `--additional-config`, `defaults`."""
    masked: bool = False
    """Masked models know it."""
    uniform: bool = True
    """DiffusionGemma, whose canvases begin as noise, does."""


# JSON's booleans arrive as 0 and 1 in vllm_xargs.
_Flag = Annotated[
    Boolean,
    BeforeValidator(lambda value: value == 1 if type(value) is int and value in (0, 1) else value),
    "a boolean (or 0/1)",
]
_Count = Annotated[Integer, Ge(1), Le(MOST_STEPS)]
_CountOrNone = Annotated[Integer, Ge(0), Le(MOST_STEPS)]
_Probability = Annotated[Number, Gt(0), Le(1)]
_ProbabilityOrZero = Annotated[Number, Ge(0), Le(1)]
_Temperature = Annotated[Number, Ge(LOWEST_MAXIMUM), Le(HIGHEST_TEMPERATURE)]
_Tokens = Annotated[list[Integer], "a list of token ids"]
_Positions = Annotated[list[Integer], "a list of canvas positions"]
_Text = Annotated[Annotated[str, Strict()] | list[Integer], "a text or a list of token ids"]
AcceptanceRule = Literal["entropy_bound", "confidence", "top_k", "in_order"]
Mode = Literal["diffusion", "self_speculation", "autoregressive"]


@settings
class RequestOptions:
    """What one request asks for. None: the server's setting."""

    max_steps: Annotated[_Count | None, Asked(by_server=True, masked=True)] = None
    canvas_length: Annotated[_Count | None, Asked()] = None
    seed_canvas: Annotated[_Tokens | None, Asked()] = None
    prediction: Annotated[_Text, Asked()] = field(default_factory=list)
    """Token ids, once the request is admitted."""
    pinned: Annotated[_Positions, Asked()] = field(default_factory=list)
    read_only: Annotated[_Flag, Asked()] = False
    constrained: Annotated[_Flag, Asked()] = False
    window_rule: Annotated[WindowRule | None, Asked(by_server=True)] = None
    t_min: Annotated[_Temperature | None, Asked(by_server=True)] = None
    t_max: Annotated[_Temperature | None, Asked(by_server=True)] = None
    acceptance: Annotated[AcceptanceRule, Asked(by_server=True, masked=True)] = "entropy_bound"
    entropy_bound: Annotated[Nats | None, Asked(by_server=True, masked=True)] = None
    accept_probability: Annotated[_Probability, Asked(by_server=True, masked=True)] = 0.9
    accept_tokens: Annotated[_Count | None, Asked(by_server=True, masked=True)] = None
    edit_probability: Annotated[
        _ProbabilityOrZero | None, Asked(by_server=True, masked=True, uniform=False)
    ] = None
    edit_steps: Annotated[_Count, Asked(by_server=True, masked=True, uniform=False)] = 16
    """LLaDA2.1's."""
    blocks_in_flight: Annotated[_Count | None, Asked(masked=True, uniform=False)] = None
    mode: Annotated[Mode, Asked(by_server=True, masked=True, uniform=False)] = "diffusion"
    confidence_threshold: Annotated[Nats | None, Asked(by_server=True)] = None
    stability_threshold: Annotated[_CountOrNone | None, Asked(by_server=True)] = None
    judge_answer_only: Annotated[_Flag | None, Asked(by_server=True)] = None
    """None: as `judges_answer_only` says."""
    load_stages: Annotated[_CountOrNone, Asked(by_server=True)] = 0
    logprobs: Annotated[Literal["unmask"] | None, Asked(masked=True, uniform=False)] = None
    """unmask: of the step that revealed a token. None: of the one that finished its block."""
    stream_canvases: Annotated[_Flag, Asked(masked=True)] = False

    # The scheduler's, which the worker's copy of the configuration may not agree with.
    joins_commits: Boolean = False
    """It commits a finished block beside its successor."""
    fits_canvases: Boolean = False
    """It narrows canvases to the tokens that may still come."""
    is_counted: Boolean = False
    """The metrics count this request's canvases."""
    reasoning: tuple[frozenset[int], frozenset[int], frozenset[int], bool] | None = None
    """The fields of a `Reasoning` that comes before the form of the answer."""
    canvas_feed: str | None = None
    """Where the API process waits for this request's canvases."""

    def __post_init__(self) -> None:
        if (self.t_min is None) != (self.t_max is None):
            raise ValueError(
                f"diffusion_t_min and diffusion_t_max come together, got {self.t_min!r} and "
                f"{self.t_max!r}."
            )
        if self.t_min is not None and self.t_max is not None and self.t_min > self.t_max:
            raise ValueError(
                f"diffusion_t_min must be at most diffusion_t_max, got {self.t_min!r} and "
                f"{self.t_max!r}."
            )
        if self.prediction and self.seed_canvas is not None:
            raise ValueError(
                f"{PREDICTION} and diffusion_seed_canvas both say what the first canvas holds. "
                f"Leave one out."
            )

    @property
    def predicted(self) -> list[int]:
        """The tokens of an admitted request's prediction."""
        assert not isinstance(self.prediction, str), "admission encodes it"
        return self.prediction

    @property
    def is_verified(self) -> bool:
        """Whether the answer is the autoregressive model's (`step.masked.verified_step`)."""
        return self.mode != "diffusion"

    @property
    def judges_answer_only(self) -> bool:
        """Whether what follows the answer's end is not waited for: an expected answer's is not."""
        return bool(self.prediction if self.judge_answer_only is None else self.judge_answer_only)

    def fitted(self, max_tokens: int | None, canvas_length: int) -> dict[str, Any]:
        """Changes for a request that may get fewer tokens than a canvas holds. Later canvases may
        be narrowed, too, unless it names a width or a canvas."""
        if max_tokens is None or self.read_only or self.canvas_length or self.seed_canvas:
            return {}
        width = fitted_width(max_tokens)
        narrow = {"canvas_length": width} if width < canvas_length else {}
        return narrow | {"fits_canvases": True}

    def carry(self, params: SamplingParams) -> None:
        """Puts these options in the place of the keys that they were made of."""
        kept = {
            key: value
            for key, value in (params.extra_args or {}).items()
            if not key.startswith(PREFIX) or key in _READ_BY_VLLM
        }
        if self.canvas_length is not None:
            kept[f"{PREFIX}canvas_length"] = self.canvas_length
        own = {name: value for name, value in vars(self).items() if value != _PLAIN[name]}
        params.extra_args = kept | {CARRIED: own}


KEYS: Mapping[str, Asked] = {
    f"{PREFIX}{name}": asked
    for name, kind in get_type_hints(RequestOptions, include_extras=True).items()
    for asked in getattr(kind, "__metadata__", ())
    if isinstance(asked, Asked)
}
"""Of a request, in the order of docs/requests.md."""
OF_STEPS = {key for key, asked in KEYS.items() if asked.masked} - {f"{PREFIX}mode", STREAM_CANVASES}
"""Keys about what a masked model's steps reveal."""
ACCEPTANCE_RULES: tuple[str, ...] = get_args(AcceptanceRule)
MODES: tuple[str, ...] = get_args(Mode)
_PLAIN = vars(RequestOptions())


def read_keys(
    given: Mapping[str, Any], defaults: Mapping[str, Any], family: Family | None
) -> RequestOptions:
    """The options of a request.

    Args:
        given: its keys.
        defaults: the server's values for those that it leaves out, from `server_defaults`.
        family: of a masked model; None: DiffusionGemma.

    Raises:
        ValueError: a key is unknown, not for this model, or its value out of range; its first word
            is the key.
    """
    asked = {key: value for key, value in given.items() if value is not None}
    for key, value in asked.items():
        _check_key(key, value, family)
    own = own_values(asked)  # alone, since a default may be what a key lacks
    return parse_settings(RequestOptions, {**defaults, **own}, PREFIX)


def own_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the values of known keys, by name without `diffusion_`.

    Raises:
        ValueError: one has another type or is out of range; its first word is the key.
    """
    own = {
        key.removeprefix(PREFIX): value
        for key, value in given.items()
        if key in KEYS and value is not None
    }
    parse_settings(RequestOptions, own, PREFIX)
    return own


def server_defaults(given: Mapping[str, Any], family: Family | None) -> Mapping[str, Any]:
    """The values of options that a request leaves out: the server's, and a masked family's.

    Raises:
        ValueError: as `read_keys`, and for a key of which a server has no default.
    """
    known = [key for key, asked in KEYS.items() if asked.by_server]
    for key in given:
        if key not in known:
            raise ValueError(_unknown(key, known))
    read_keys(given, {}, family)
    own = {key.removeprefix(PREFIX): value for key, value in given.items() if value is not None}
    if family is None:
        return own
    published: dict[str, Any] = {
        "acceptance": "confidence",
        "accept_probability": family.threshold,
        "entropy_bound": MASKED_ENTROPY_BOUND,
    }
    if family.edit_probability is not None:
        published["edit_probability"] = family.edit_probability
    return published | own


def _check_key(key: str, value: Any, family: Family | None) -> None:
    if (asked := KEYS.get(key)) is None:
        raise ValueError(_unknown(key, KEYS))
    if family is not None and not asked.masked:
        known = sorted(key for key, asked in KEYS.items() if asked.masked)
        raise ValueError(
            f"{key} is not for masked models, got {value!r}. Leave it out; they take "
            f"{', '.join(known)}."
        )
    if family is None and not asked.uniform:
        raise ValueError(f"{key} is for masked models, got {value!r}. Leave it out.")
    if key == f"{PREFIX}mode" and family is not None and not family.is_causal:
        raise ValueError(
            f"{key} is for Nemotron-Labs-Diffusion, whose known tokens see those before them "
            f"alone, got {value!r}. Leave it out."
        )
    if key == f"{PREFIX}logprobs" and family is not None and family.moves_tokens:
        raise ValueError(
            f"{key} is not for LLaDA2.2, whose tokens change their places after the step that "
            f"revealed them, got {value!r}. Leave it out."
        )
    if family is None and key == "diffusion_acceptance" and value == "in_order":
        raise ValueError(
            "diffusion_acceptance 'in_order' is for masked models, whose canvases fill up token by "
            "token. Choose another one."
        )


def _unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that is none of `known`."""
    names = [one.removeprefix(PREFIX) for one in known]
    return describe_unknown_name(normalize_name(key).removeprefix(PREFIX), names, PREFIX, shown=key)


def carried(params: SamplingParams | None) -> RequestOptions | None:
    """Returns the options of an admitted request, and None for one that was not admitted, as a
    warm-up's."""
    own = _own(params)
    return None if own is None else RequestOptions(**own)


def is_read_only(params: SamplingParams | None) -> bool:
    """Whether an admitted request emits its first canvas without a commit and then ends."""
    return (_own(params) or {}).get("read_only", False)


def fits_canvases(params: SamplingParams | None) -> bool:
    return (_own(params) or {}).get("fits_canvases", False)


def _own(params: SamplingParams | None) -> Mapping[str, Any] | None:
    return None if params is None else (params.extra_args or {}).get(CARRIED)


def fitted_width(num_tokens: Any) -> Any:
    """Width of a canvas for this many tokens that may still come; a number or a tensor."""
    return (num_tokens + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
