"""What a request may ask of a masked model: a part of the keys for DiffusionGemma
(`requests.keys`), and rules that are SDAR's published ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.requests.keys import STREAM_CANVASES

ENTROPY_BOUND = 0.35  # nats, SDAR's
KEYS = frozenset(
    {
        "diffusion_acceptance",
        "diffusion_accept_probability",
        "diffusion_accept_tokens",
        "diffusion_edit_probability",
        "diffusion_edit_steps",
        "diffusion_entropy_bound",
        "diffusion_max_steps",
        STREAM_CANVASES,
    }
)


def with_defaults(extension: ExtensionConfig, threshold: float) -> ExtensionConfig:
    """With the values for keys that neither a request nor the server has set."""
    defaults = {
        "diffusion_acceptance": "confidence",
        "diffusion_accept_probability": threshold,
        "diffusion_entropy_bound": ENTROPY_BOUND,
    }
    return replace(extension, defaults=defaults | dict(extension.defaults))


def check_keys(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a diffusion key that masked models do not have."""
    for key, value in given.items():
        if key.startswith("diffusion_") and key not in KEYS and value is not None:
            raise ValueError(
                f"{key} is not for masked models, got {value!r}. Leave it out; they take "
                f"{', '.join(sorted(KEYS))}."
            )


def check_causal_request(params: SamplingParams) -> None:
    """Raises VLLMValidationError, which becomes HTTP 400."""
    try:
        check_keys(params.extra_args or {})
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error


def check_masked_request(params: SamplingParams) -> None:
    """Of a model whose known tokens see their whole block. Raises VLLMValidationError, which
    becomes HTTP 400."""
    check_causal_request(params)
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        raise VLLMValidationError(
            "prompt_logprobs is not possible with a masked model: a row of the prompt has seen its "
            "own token and those of its block. Leave it out.",
            parameter="prompt_logprobs",
        )


def check_unmasked(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that only masked models know."""
    if given.get("diffusion_acceptance") == "in_order":
        raise ValueError(
            "diffusion_acceptance 'in_order' is for masked models, whose canvases fill up token by "
            "token. Choose another one."
        )
    for key in ("diffusion_edit_probability", "diffusion_edit_steps"):
        if given.get(key) is not None:
            raise ValueError(f"{key} is for masked models, got {given[key]!r}. Leave it out.")


def check_unmasked_request(params: SamplingParams) -> None:
    """Raises VLLMValidationError, which becomes HTTP 400."""
    try:
        check_unmasked(params.extra_args or {})
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error
