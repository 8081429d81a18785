"""What one request may ask of a server that serves others at the same time.

All functions raise VLLMValidationError, which becomes HTTP 400 and names the limit, what came and
the setting.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.limits import RequestLimits
from vllm_dllm.requests.keys import PREDICTION
from vllm_dllm.requests.options import is_read_only


def check_parameters(config: VllmConfig, params: SamplingParams) -> None:
    """As they came."""
    limits = _limits(config)
    _at_most("n", "answers", params.n, limits.n)
    _at_most("bad_words", "tokens", len(params.bad_words or ()), limits.bad_words)
    _at_most("logit_bias", "tokens", len(params.logit_bias or ()), limits.logit_bias)
    width = (params.extra_args or {}).get("diffusion_canvas_length")
    is_narrow = isinstance(width, int) and width < limits.canvas_length
    if is_narrow and not is_read_only(params):  # that is one canvas, however narrow
        raise VLLMValidationError(
            f"diffusion_canvas_length must be at least {limits.canvas_length} on this server, got "
            f"{width}: a canvas takes as many steps for a few tokens as for many. Ask for a wider "
            f"one, or start the server with a lower limits.canvas_length.",
            parameter="diffusion_canvas_length",
        )


def check_tokens(config: VllmConfig, params: SamplingParams, num_prompt_tokens: int) -> None:
    """Of one prompt, when its bad words and its prediction are tokens."""
    words = params.bad_words_token_ids or ()
    _at_most("bad_words", "tokens", sum(map(len, words)), _limits(config).bad_words)
    prediction = (params.extra_args or {}).get(PREDICTION) or ()
    _at_most("prediction", "tokens", len(prediction), _limits(config).prediction)
    _check_prompt_logprobs(config, params.prompt_logprobs, num_prompt_tokens)


def check_size(config: VllmConfig, request: Any, lengths: list[int]) -> None:
    """Of an HTTP request whose prompts have so many tokens."""
    num_answers = len(lengths) * (getattr(request, "n", None) or 1)
    _at_most("n", "answers", num_answers, _limits(config).n)
    count = getattr(request, "prompt_logprobs", None)
    if count is None and getattr(request, "echo", False):
        count = request.logprobs
    _check_prompt_logprobs(config, count, sum(lengths))


def _check_prompt_logprobs(config: VllmConfig, count: int | None, num_tokens: int) -> None:
    """`count` for each token and one for the token itself; -1 stands for the vocabulary."""
    if count is not None:
        each = config.model_config.get_vocab_size() if count < 0 else count + 1
        most = _limits(config).prompt_logprobs
        _at_most("prompt_logprobs", "log-probabilities", num_tokens * each, most)


def _at_most(name: str, unit: str, value: int, most: int) -> None:
    if value > most:
        raise VLLMValidationError(
            f"{name} must ask for at most {most} {unit} on this server, got {value}. Ask for less, "
            f"or start the server with a higher limits.{name}.",
            parameter=name,
        )


def _limits(config: VllmConfig) -> RequestLimits:
    return ExtensionConfig.from_additional_config(config.additional_config).limits
