"""The options of a request: what it asks of a diffusion model beside vLLM's sampling parameters.

A field of `RequestOptions` that is marked as a `RequestKey` is a key that clients send, with
`diffusion_` before its name: in `vllm_xargs`, or offline in `SamplingParams.extra_args`.
docs/requests.md says what each key means. Each request gets one `RequestOptions`
(`requests.admission`), which travels with its parameters to the scheduler and the worker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Strict
from vllm.sampling_params import SamplingParams

from vllm_dllm.config import checks
from vllm_dllm.config.architectures import Family, takes_acceptance
from vllm_dllm.config.denoise import HIGHEST_TEMPERATURE, LOWEST_MAXIMUM, MOST_STEPS, Nats
from vllm_dllm.config.extension import WindowRule
from vllm_dllm.config.step_sizes import narrowed_width

PREFIX = "diffusion_"
STREAM_CANVASES = f"{PREFIX}stream_canvases"
"""The key that asks for canvases in a stream. The API process (`vllm_dllm.canvases`) serves it and
removes it from the request. Where nothing removes it, admission refuses the request."""
PREDICTION = f"{PREFIX}prediction"
MASKED_ENTROPY_BOUND = 0.35  # nats, as in SDAR; the default of masked models
OPTIONS_KEY = "vllm_dllm"
"""The entry of `extra_args` that has the options of an admitted request."""
_KEYS_FOR_VLLM = {f"{PREFIX}{name}" for name in ("canvas_length", "max_steps", "read_only")}
"""Keys that vLLM's schedulers read."""


@dataclass(frozen=True)
class RequestKey:
    """Marks a field of `RequestOptions` that clients may send."""

    by_server: bool = False
    """Whether a server may have a default for the key, in `defaults` of `--additional-config`."""
    masked: bool = False
    """Whether masked models take the key."""
    uniform: bool = True
    """Whether DiffusionGemma, whose canvases begin as noise, takes the key."""


_OF_MASKED = RequestKey(by_server=True, masked=True, uniform=False)
# JSON's booleans arrive as 0 and 1 in vllm_xargs.
_Flag = Annotated[
    checks.Boolean,
    BeforeValidator(lambda value: value == 1 if type(value) is int and value in (0, 1) else value),
    "a boolean (or 0/1)",
]
_Count = Annotated[checks.Integer, Ge(1), Le(MOST_STEPS)]
_CountOrNone = Annotated[checks.Integer, Ge(0), Le(MOST_STEPS)]
_Probability = Annotated[checks.Number, Gt(0), Le(1)]
_ProbabilityOrZero = Annotated[checks.Number, Ge(0), Le(1)]
_Temperature = Annotated[checks.Number, Ge(LOWEST_MAXIMUM), Le(HIGHEST_TEMPERATURE)]
_Tokens = Annotated[list[checks.Integer], "a list of token ids"]
_Positions = Annotated[list[checks.Integer], "a list of canvas positions"]
_Text = Annotated[Annotated[str, Strict()] | list[checks.Integer], "a text or a list of token ids"]
AcceptanceRule = Literal["entropy_bound", "confidence", "top_k", "in_order", "verified"]
Mode = Literal["diffusion", "self_speculation", "autoregressive"]


@checks.settings
class RequestOptions:
    """The options of one request. None means the server's setting."""

    max_steps: Annotated[_Count | None, RequestKey(by_server=True, masked=True)] = None
    canvas_length: Annotated[_Count | None, RequestKey()] = None
    seed_canvas: Annotated[_Tokens | None, RequestKey()] = None
    prediction: Annotated[_Text, RequestKey()] = field(default_factory=list)
    """A text becomes token ids when the request is admitted."""
    pinned: Annotated[_Positions, RequestKey()] = field(default_factory=list)
    read_only: Annotated[_Flag, RequestKey()] = False
    constrained: Annotated[_Flag, RequestKey()] = False
    window_rule: Annotated[WindowRule | None, RequestKey(by_server=True)] = None
    t_min: Annotated[_Temperature | None, RequestKey(by_server=True)] = None
    t_max: Annotated[_Temperature | None, RequestKey(by_server=True)] = None
    acceptance: Annotated[AcceptanceRule, RequestKey(by_server=True, masked=True)] = "entropy_bound"
    entropy_bound: Annotated[Nats | None, RequestKey(by_server=True, masked=True)] = None
    accept_probability: Annotated[_Probability, RequestKey(by_server=True, masked=True)] = 0.9
    accept_tokens: Annotated[_Count | None, RequestKey(by_server=True, masked=True)] = None
    edit_probability: Annotated[_ProbabilityOrZero | None, _OF_MASKED] = None
    edit_steps: Annotated[_Count, _OF_MASKED] = 16
    """16 is the default of LLaDA2.1."""
    blocks_in_flight: Annotated[_Count | None, _OF_MASKED] = None
    mode: Annotated[Mode, _OF_MASKED] = "diffusion"
    confidence_threshold: Annotated[Nats | None, RequestKey(by_server=True)] = None
    stability_threshold: Annotated[_CountOrNone | None, RequestKey(by_server=True)] = None
    judge_answer_only: Annotated[_Flag | None, RequestKey(by_server=True)] = None
    """None: yes for requests that predict their answer, see `judges_answer_only`."""
    load_stages: Annotated[_CountOrNone, RequestKey(by_server=True)] = 0
    logprobs: Annotated[Literal["unmask"] | None, RequestKey(masked=True, uniform=False)] = None
    """None: of the step that finished the block. "unmask": of the step that revealed the token."""
    stream_canvases: Annotated[_Flag, RequestKey(masked=True)] = False

    # Set by the scheduler, since the worker's copy of the configuration may differ from its own.
    joins_commits: checks.Boolean = False
    """Whether a finished block is committed in the same forward as the next block's first step."""
    fits_canvases: checks.Boolean = False
    """Whether canvases are narrowed to the number of tokens that the answer may still get."""
    is_counted: checks.Boolean = False
    """Whether the metrics count this request's canvases."""
    reasoning: tuple[frozenset[int], frozenset[int], frozenset[int], bool] | None = None
    """The fields of `grammar.state.Reasoning`, for reasoning before a structured output."""
    http_request: str | None = None
    """The name of the HTTP request that this one is part of; None offline."""
    canvas_feed: str | None = None
    """The name of the feed on which the API process waits for the canvases; None: not watched."""

    @property
    def prediction_tokens(self) -> list[int]:
        """The token ids of an admitted request's prediction; empty if it has none."""
        assert not isinstance(self.prediction, str), "admission encodes it"
        return self.prediction

    @property
    def is_verified(self) -> bool:
        """Whether every token is chosen autoregressively (`step.masked.first_token_step`)."""
        return self.mode != "diffusion"

    @property
    def judges_answer_only(self) -> bool:
        """Whether a canvas may finish although positions after the answer's end have not settled.
        By default it may if the request predicts its answer."""
        return bool(self.prediction if self.judge_answer_only is None else self.judge_answer_only)

    def narrowing(self, max_tokens: int | None, canvas_length: int) -> dict[str, Any]:
        """Returns fields that narrow canvases to `max_tokens`; {} if the request has its own."""
        if max_tokens is None or self.read_only or self.canvas_length or self.seed_canvas:
            return {}
        width = narrowed_width(max_tokens)
        narrow = {"canvas_length": width} if width < canvas_length else {}
        return narrow | {"fits_canvases": True}

    def store_in(self, params: SamplingParams) -> None:
        """Stores these options in `params.extra_args`, in place of the keys that set them. Keys
        that vLLM's schedulers read stay, with the width of these options."""
        extra_args = {
            key: value
            for key, value in (params.extra_args or {}).items()
            if not key.startswith(PREFIX) or key in _KEYS_FOR_VLLM
        }
        if self.canvas_length is not None:
            extra_args[f"{PREFIX}canvas_length"] = self.canvas_length
        changed = {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}
        params.extra_args = extra_args | {OPTIONS_KEY: changed}


KEYS: Mapping[str, RequestKey] = {
    f"{PREFIX}{name}": mark
    for name, kind in get_type_hints(RequestOptions, include_extras=True).items()
    for mark in getattr(kind, "__metadata__", ())
    if isinstance(mark, RequestKey)
}
"""The keys of a request, such as "diffusion_max_steps", in the order of docs/requests.md."""
OTHER_NAMES = {"max_denoising_steps": "max_steps"}
"""Names that `--diffusion-config` and `generation_config.json` have for fields."""
STEP_KEYS = {key for key, mark in KEYS.items() if mark.masked} - {f"{PREFIX}mode", STREAM_CANVASES}
"""Keys that decide what a masked model's steps reveal, and its log-probabilities."""
ACCEPTANCE_RULES: tuple[str, ...] = get_args(AcceptanceRule)
_DEFAULTS = vars(RequestOptions())


def parse_keys(
    given: Mapping[str, Any],  # the request's keys
    defaults: Mapping[str, Any],  # for keys that it leaves out, from `server_defaults`
    family: Family | None,  # of a masked model; None: DiffusionGemma
) -> RequestOptions:
    """Returns the options that a request's keys ask for. Raises ValueError if a key is unknown, not
    for this model, or its value is out of range. The message begins with the key."""
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        _check_key(key, value, family)
    parsed = parse_values(values)
    _check_pairs(parsed)  # without defaults, which must not complete a request's keys
    return checks.parse_settings(RequestOptions, {**defaults, **parsed}, PREFIX)


def _check_pairs(values: Mapping[str, Any]) -> None:
    """Raises ValueError if values of a request, by field, contradict each other."""
    t_min, t_max = values.get("t_min"), values.get("t_max")
    if (t_min is None) != (t_max is None):
        raise ValueError(
            f"diffusion_t_min and diffusion_t_max come together, got {t_min!r} and {t_max!r}. Give "
            f"both or neither."
        )
    if t_min is not None and t_max is not None and t_min > t_max:
        raise ValueError(
            f"diffusion_t_min must be at most diffusion_t_max, got {t_min!r} and {t_max!r}."
        )
    if values.get("prediction") and values.get("seed_canvas") is not None:
        raise ValueError(
            f"{PREDICTION} and diffusion_seed_canvas both say what the first canvas holds. Leave "
            f"one out."
        )


def parse_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the known keys, by field of `RequestOptions`. Raises ValueError, whose
    message begins with the key, if a value has a wrong type or is out of range."""
    values = {
        key.removeprefix(PREFIX): value
        for key, value in given.items()
        if key in KEYS and value is not None
    }
    checks.parse_settings(RequestOptions, values, PREFIX)
    return values


def server_defaults(given: Mapping[str, Any], family: Family | None) -> Mapping[str, Any]:
    """Returns the values of options that a request leaves out, by field. The server's configuration
    `given`, by key, wins over what a masked family has published. Raises ValueError as `parse_keys`
    does, and for a key that may not have a default."""
    known = [key for key, mark in KEYS.items() if mark.by_server]
    for key in given:
        if key not in known:
            place = f"{key} under defaults of --additional-config"
            raise ValueError(_unknown_key_message(key, known, place))
    parse_keys(given, {}, family)
    own = {key.removeprefix(PREFIX): value for key, value in given.items() if value is not None}
    if family is None:
        return own
    published: dict[str, Any] = {
        "acceptance": "confidence",
        "accept_probability": family.threshold,
        "entropy_bound": MASKED_ENTROPY_BOUND,
        "edit_probability": family.edit_probability,
    }
    return published | own


def _check_key(key: str, value: Any, family: Family | None) -> None:
    """Raises ValueError for a key, or an acceptance rule, that is unknown or not for this model."""
    if (mark := KEYS.get(key)) is None:
        raise ValueError(_unknown_key_message(key, KEYS))
    if family is not None and not mark.masked:
        known = sorted(key for key, mark in KEYS.items() if mark.masked)
        raise ValueError(
            f"{key} is not for masked models, got {value!r}. Leave it out; they take "
            f"{', '.join(known)}."
        )
    if family is None and not mark.uniform:
        raise ValueError(f"{key} is for masked models, got {value!r}. Leave it out.")
    if key == f"{PREFIX}mode" and family is not None and not family.is_causal:
        raise ValueError(
            f"{key} is for Nemotron-Labs-Diffusion, whose known tokens see only tokens "
            f"before them, got {value!r}. Leave it out."
        )
    if key == f"{PREFIX}logprobs" and family is not None and family.moves_tokens:
        raise ValueError(
            f"{key} is not for LLaDA2.2, whose tokens change their places after the step that "
            f"revealed them, got {value!r}. Leave it out."
        )
    rules = [rule for rule in ACCEPTANCE_RULES if takes_acceptance(family, rule)]
    if key == f"{PREFIX}acceptance" and value in ACCEPTANCE_RULES and value not in rules:
        raise ValueError(f"{key} {value!r} is not for this model. Choose {', '.join(rules)}.")


def _unknown_key_message(key: str, known: Iterable[str], shown: str = "") -> str:
    """Returns the error message for a key that is none of `known`. `shown`: the key and its place,
    if that is not a request."""
    names = [one.removeprefix(PREFIX) for one in known]
    shown = shown or (key if key.split() == [key] else repr(key))
    name = checks.normalize_name(key).removeprefix(PREFIX)
    return checks.describe_unknown_name(OTHER_NAMES.get(name, name), names, PREFIX, shown)


def load_options(params: SamplingParams | None) -> RequestOptions | None:
    """Returns the options that admission stored; None without admission, such as for a warm-up."""
    own = _stored_fields(params)
    return None if own is None else RequestOptions(**own)


def load_option(params: SamplingParams | None, name: str) -> Any:
    """Returns one of the options that admission stored, in less time than all of them; its default
    without admission."""
    return (_stored_fields(params) or {}).get(name, _DEFAULTS[name])


def _stored_fields(params: SamplingParams | None) -> Mapping[str, Any] | None:
    return None if params is None else (params.extra_args or {}).get(OPTIONS_KEY)
