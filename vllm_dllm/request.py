"""Per-request options of a diffusion model, from `SamplingParams.extra_args` (`vllm_xargs`).

| key                       | value                | meaning                                      |
|---------------------------|----------------------|----------------------------------------------|
| `diffusion_max_steps`     | int >= 1             | step cap; the temperature schedule spans it  |
| `diffusion_canvas_length` | int in 1..C          | a narrower canvas                            |
| `diffusion_seed_canvas`   | token ids, as many   | the first canvas, instead of a random one    |
|                           | as the canvas has    |                                              |
| `diffusion_pinned`        | canvas positions     | held at the seed canvas while denoising it   |
| `diffusion_read_only`     | bool                 | emit the first canvas on its last step; end  |
| `diffusion_constrained`   | bool                 | sample among `logprob_token_ids` only        |
| `diffusion_window_rule`   | `reference` or       | which keys a canvas row sees on sliding      |
|                           | `symmetric`          | layers                                       |
"""

import reprlib
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.diffusion import validate_diffusion_sampling_params

from vllm_dllm.config import check_window_rule


@dataclass(frozen=True)
class RequestOptions:
    """The options of one admitted request; values are valid by then."""

    max_steps: int | None
    canvas_length: int | None
    first_canvas: list[int] | None
    pinned: list[int]
    read_only: bool
    allowed_token_ids: tuple[int, ...] | None
    window_rule: str | None

    @classmethod
    def from_sampling_params(cls, params: SamplingParams) -> "RequestOptions":
        extra: dict[str, Any] = params.extra_args or {}
        constrained = bool(extra.get("diffusion_constrained"))
        return cls(
            max_steps=extra.get("diffusion_max_steps"),
            canvas_length=extra.get("diffusion_canvas_length"),
            first_canvas=extra.get("diffusion_seed_canvas"),
            pinned=list(extra.get("diffusion_pinned") or ()),
            read_only=is_read_only(params),
            allowed_token_ids=tuple(params.logprob_token_ids or ()) if constrained else None,
            window_rule=extra.get("diffusion_window_rule"),
        )


def is_read_only(params: SamplingParams | None) -> bool:
    """Whether a request emits its first canvas without a commit, and ends."""
    return bool(params is not None and (params.extra_args or {}).get("diffusion_read_only"))


def check_sampling_params(params: SamplingParams) -> None:
    """Refuses the sampling parameters a canvas has no meaning for yet. `seed` has one: it keys the
    request's noise.

    Raises:
        VLLMValidationError: answered with HTTP 400; names each parameter and what came.
    """
    neutral = {
        "temperature": 1.0,
        "min_p": 0.0,
        "min_tokens": 0,
        "logit_bias": None,
        "bad_words": None,
        "allowed_token_ids": None,
        "prompt_logprobs": None,
    }
    given = {
        name: value
        for name, value in ((name, getattr(params, name)) for name in neutral)
        if value != neutral[name] and value not in ([], {})
    }
    if given:
        raise VLLMValidationError(
            f"Sampling parameters a diffusion model does not support: {given}. Leave them out; "
            f"temperature must be 1.0, as a canvas is denoised by the model's own schedule.",
            parameter=next(iter(given)),
        )


def _culprits(key: str, value: Any, canvas_length: int | None, vocab_size: int) -> str:
    """`value` in short; of a list, the entries that are wrong, if any is wrong by itself."""
    limits = {"diffusion_seed_canvas": vocab_size, "diffusion_pinned": canvas_length}
    limit = limits.get(key)
    if limit is not None and isinstance(value, (list, tuple)):
        wrong = [v for v in value if not isinstance(v, int) or not 0 <= v < limit]
        if wrong:
            return f"[..., {', '.join(map(repr, wrong[:3]))}, ...]"
        return f"a list of {len(value)}"
    return reprlib.repr(value)


def check_request(params: SamplingParams, *, canvas_length: int | None, vocab_size: int) -> None:
    """Admission check: vLLM's own, then ours. May narrow `params` (read-only requests).

    Raises:
        VLLMValidationError: answered with HTTP 400; says which key, what was expected, what came.
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
    rule = extra.get("diffusion_window_rule")
    if rule is not None:
        try:
            check_window_rule(rule)
        except ValueError as error:
            raise VLLMValidationError(
                f"diffusion_window_rule: {error}", parameter="extra_args"
            ) from error
