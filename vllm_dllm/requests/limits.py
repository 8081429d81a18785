"""Limits what one request may cost a server that serves others at the same time.

The checks raise VLLMValidationError, which becomes HTTP 400. It names the limit, what came, and the
setting that changes the limit.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.options import RequestOptions


@dataclass
class _Total:
    """Sums over the prompts of one HTTP request."""

    answers: int = 0
    prompt_logprobs: int = 0


_total: ContextVar[_Total | None] = ContextVar("of this task's HTTP request", default=None)


def begin_http_request() -> None:
    """Starts the sums over an HTTP request at 0. The current task, or its children, admit the
    prompts of this request from now on."""
    _total.set(_Total())


def check_request_limits(
    limits: RequestLimits, params: SamplingParams, options: RequestOptions
) -> None:
    """Checks the parameters of one prompt as the client sent them, and adds its answers to those of
    its HTTP request. Raises VLLMValidationError if they exceed a limit."""
    total = _total.get() or _Total()
    total.answers += params.n
    _check_limit("n", "answers", total.answers, limits.n)
    _check_limit("bad_words", "tokens", len(params.bad_words or ()), limits.bad_words)
    _check_limit("logit_bias", "tokens", len(params.logit_bias or ()), limits.logit_bias)
    width = options.canvas_length or limits.canvas_length
    if width < limits.canvas_length and not options.read_only:  # its answer is one canvas
        raise VLLMValidationError(
            f"diffusion_canvas_length must be at least {limits.canvas_length} on this server, got "
            f"{width}: a canvas takes as many steps for a few tokens as for many. Ask for a wider "
            f"one, or start the server with a lower limits.canvas_length.",
            parameter="diffusion_canvas_length",
        )


def check_token_limits(
    limits: RequestLimits,
    params: SamplingParams,
    options: RequestOptions,
    num_prompt_tokens: int,
    vocab_size: int,
) -> None:
    """Checks the parameters of one prompt once its bad words and prediction are tokens, and adds
    its prompt log-probabilities to those of its HTTP request. Raises VLLMValidationError if they
    exceed a limit."""
    words = params.bad_words_token_ids or ()
    _check_limit("bad_words", "tokens", sum(map(len, words)), limits.bad_words)
    _check_limit("prediction", "tokens", len(options.prediction_tokens), limits.prediction)
    if (count := params.prompt_logprobs) is not None:
        # `count` for each token, and one for the token itself; -1 means the whole vocabulary.
        total = _total.get() or _Total()
        total.prompt_logprobs += num_prompt_tokens * (vocab_size if count < 0 else count + 1)
        most = limits.prompt_logprobs
        _check_limit("prompt_logprobs", "log-probabilities", total.prompt_logprobs, most)


def _check_limit(name: str, unit: str, value: int, most: int) -> None:
    """Raises VLLMValidationError if a parameter asks for more than the limit `most`."""
    if value > most:
        raise VLLMValidationError(
            f"{name} must ask for at most {most} {unit} on this server, got {value}. Ask for less, "
            f"or start the server with a higher limits.{name}.",
            parameter=name,
        )
