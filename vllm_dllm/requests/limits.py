"""Limits what one request may cost a server that serves others at the same time, and refuses
sampling parameters that no sampler can serve.

vLLM's sampler, which serves the targets of drafters, checks some parameters only in the worker. An
error there ends the engine and everybody's requests. The checks raise VLLMValidationError, which
becomes HTTP 400. It names the limit, what came, and the setting that changes the limit.
"""

import math
import re
import reprlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid

from vllm_dllm.compat.admission import MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS
from vllm_dllm.config.checks import MAX_COUNT
from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.options import RequestOptions


def refusal(message: str) -> VLLMValidationError:
    """Returns the error for a request, whose message begins with the parameter or the key that it
    is about, in quotes if that is no plain word. It becomes HTTP 400. Does not raise it."""
    first = re.match(r"'[^']*'|\S+", message)
    return VLLMValidationError(message, parameter=first and first[0].strip("'"))


@dataclass
class _HttpRequest:
    """One HTTP request, and sums over its prompts."""

    name: str | None = None
    adds_up: bool = False
    answers: int = 0
    prompt_logprobs: int = 0


_http_request: ContextVar[_HttpRequest | None] = ContextVar("of this task", default=None)


def begin_http_request(*, adds_up: bool = True) -> None:
    """Names an HTTP request, and starts the sums over its prompts at 0. The current task, or its
    children, admit the prompts of this request from now on. Without `adds_up`, limits apply to each
    prompt alone."""
    _http_request.set(_HttpRequest(random_uuid(), adds_up))


def http_request_name() -> str | None:
    """Returns the name of the HTTP request that this task serves; None if it serves none."""
    request = _http_request.get()
    return request.name if request else None


def _sums() -> _HttpRequest:
    """Returns the sums that the next prompt adds to."""
    request = _http_request.get()
    return request if request and request.adds_up else _HttpRequest()


def check_request_limits(
    limits: RequestLimits, params: SamplingParams, options: RequestOptions
) -> None:
    """Checks the parameters of one prompt as the client sent them, and adds its answers to those of
    its HTTP request. Raises VLLMValidationError if they exceed a limit."""
    total = _sums()
    total.answers += params.n
    _check_limit("n", "answers", total.answers, limits.n)
    _check_limit("bad_words", "tokens", len(params.bad_words or ()), limits.bad_words)
    _check_limit("logit_bias", "tokens", len(params.logit_bias or ()), limits.logit_bias)
    width = options.canvas_length or limits.canvas_length
    if width < limits.canvas_length and not options.read_only:  # its answer is one canvas
        raise refusal(
            f"diffusion_canvas_length must be at least {limits.canvas_length} on this server, got "
            f"{width}: a canvas takes as many steps for a few tokens as for many. Ask for a wider "
            f"one, or start the server with a lower limits.canvas_length."
        )


def check_prediction_text(limits: RequestLimits, options: RequestOptions, tokenizer: Any) -> None:
    """Raises VLLMValidationError if a prediction, as a text, certainly has too many tokens. Its
    tokens are found while all clients wait, so only for texts that may be short enough."""
    text = options.prediction
    if not isinstance(text, str):
        return
    most = limits.prediction * tokenizer.max_chars_per_token  # of vLLM's, which limits prompts so
    if len(text) > most:
        raise refusal(
            f"prediction must ask for at most {limits.prediction} tokens on this server, got a "
            f"text of {len(text)} characters, where {most} have room. Ask for less, or start the "
            f"server with a higher limits.prediction."
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
        total = _sums()
        total.prompt_logprobs += num_prompt_tokens * (vocab_size if count < 0 else count + 1)
        most = limits.prompt_logprobs
        _check_limit("prompt_logprobs", "log-probabilities", total.prompt_logprobs, most)


def _check_limit(name: str, unit: str, value: int, most: int) -> None:
    """Raises VLLMValidationError if a parameter asks for more than the limit `most`."""
    if value > most:
        raise refusal(
            f"{name} must ask for at most {most} {unit} on this server, got {value}. Ask for less, "
            f"or start the server with a higher limits.{name}."
        )


SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**63 - 1
"""What fits into 64 bits, as in messages to the engine."""
MOST_REPEATED = 512
"""The most tokens that a request may have looked at behind each token for a repetition."""
LARGEST_EMBEDDING = 1e4
"""The largest value in a prompt of embeddings. Half precision holds 65504."""
LARGEST_PENALTY = 1e6
"""The largest repetition penalty. A logit in fp32 that is multiplied or divided by it stays finite
and does not become 0."""


def check_numbers(params: SamplingParams) -> None:
    """Checks the numbers of a request for any model. Raises VLLMValidationError for numbers that
    the worker cannot store, or that would make logits infinite or NaN."""
    if (params.max_tokens or 0) > MAX_COUNT:  # the worker adds the prompt's length, in 32 bits
        raise refusal(
            f"max_tokens must be at most {MAX_COUNT}, got {params.max_tokens}. Leave it out to get "
            f"as many as the context has room for."
        )
    last = params.n - 1  # answer i, counted from 0, has the seed + i
    if params.seed is not None and not SMALLEST_INTEGER <= params.seed <= LARGEST_INTEGER - last:
        raise refusal(
            f"seed must be from {SMALLEST_INTEGER} to {LARGEST_INTEGER - last} for n = {params.n}, "
            f"got {params.seed}. Take a smaller one."
        )
    penalty = params.repetition_penalty
    if not 1 / LARGEST_PENALTY <= penalty <= LARGEST_PENALTY:
        raise refusal(
            f"repetition_penalty must be from {1 / LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, got "
            f"{penalty!r}. 1 is none, and 2 is much."
        )
    for token, value in (params.logit_bias or {}).items():
        if not math.isfinite(value):
            raise refusal(
                f"logit_bias must be numbers from -100 to 100, got {value!r} for token {token}. "
                f"Use allowed_token_ids or bad_words to exclude tokens."
            )
    for name in params.__struct_fields__:
        number = getattr(params, name)
        if isinstance(number, int) and not SMALLEST_INTEGER <= number <= LARGEST_INTEGER:
            raise refusal(
                f"{name} must be from {SMALLEST_INTEGER} to {LARGEST_INTEGER}, got {number}. Take "
                f"another value or leave it out."
            )


def check_embeddings(embeddings: torch.Tensor | None) -> None:
    """Raises VLLMValidationError if a prompt has embeddings that no model computes with. A NaN
    would stay in the KV cache, where attention multiplies it by 0 when later requests reuse the
    block: their answers would be wrong."""
    if embeddings is None or (embeddings.abs() <= LARGEST_EMBEDDING).all():  # False for NaN
        return
    raise refusal(
        f"prompt_embeds must be from {-LARGEST_EMBEDDING:g} to {LARGEST_EMBEDDING:g}, got "
        f"{embeddings.min():g} to {embeddings.max():g}. Correct them."
    )


def check_repetition_detection(params: SamplingParams) -> None:
    """Raises VLLMValidationError if a request asks to find long repetitions. The engine looks for
    those of each size after each token, in Python, while everybody waits: 0.3 s for one token of
    8,000 if there is no limit."""
    wanted = params.repetition_detection
    if wanted is None:
        return
    size, count = max(wanted.max_pattern_size, 1), wanted.min_count
    if size * count > MOST_REPEATED:
        raise refusal(
            f"repetition_detection must look at no more than {MOST_REPEATED} tokens, "
            f"max_pattern_size times min_count, got {size} times {count}. Lower one of them."
        )


def check_sampler_limits(params: SamplingParams) -> None:
    """Checks a request for a model that vLLM's sampler serves, once its bad words are tokens.
    Raises VLLMValidationError for a list of tokens for which the sampler has no room."""
    stops = params.all_stop_token_ids if params.min_tokens > 0 else ()
    bad_words = sum(map(len, params.bad_words_token_ids or ()))
    for key, count, most, remedy in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ALLOWED_TOKENS, ""),
        ("stop_token_ids", len(stops), MAX_STOP_TOKENS, ", or leave out min_tokens"),
        ("bad_words", bad_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, ""),
    ):
        if count > most:
            raise refusal(
                f"{key} must have at most {most} tokens on this server, got {count}. Name "
                f"fewer{remedy}."
            )


def check_allowed_tokens(params: SamplingParams, *, is_constrained: bool = False) -> None:
    """Raises VLLMValidationError if `bad_words` or `min_tokens` exclude all tokens that a request
    allows. With `is_constrained` it allows only its `logprob_token_ids`."""
    key = "logprob_token_ids" if is_constrained else "allowed_token_ids"
    allowed = set(getattr(params, key) or ())
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
        raise refusal(
            f"{key} must leave a token that {' and '.join(culprits)} do not exclude, got "
            f"{reprlib.repr(sorted(allowed))} with "
            + " and ".join(f"{name} = {getattr(params, name)!r}" for name in culprits)
            + ". Allow another token, or leave out one of them."
        )


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises VLLMValidationError if a prompt has a token outside of the model's vocabulary. vLLM
    lets ids of a larger tokenizer pass, and all where there is no tokenizer."""
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise VLLMValidationError(
                f"token ids of a prompt must be from 0 to {vocab_size - 1}, got {token}. Use the "
                f"tokenizer that belongs to the model.",
                parameter="prompt",
            )


def check_logprobs(params: SamplingParams, vocab_size: int) -> None:
    """Raises VLLMValidationError if a request asks for the log-probabilities of more tokens than
    the vocabulary has. `--max-logprobs` may allow it."""
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise refusal(
                f"{name} must be at most {vocab_size}, the tokens of the vocabulary, got {count}. "
                f"Ask for less, or for -1, which is all of them."
            )


def check_first_token(params: SamplingParams, vocab_size: int) -> None:
    """Raises VLLMValidationError if no token can begin the answer: `bad_words` and `min_tokens`
    exclude the whole vocabulary."""
    excluded = {word[0] for word in params.bad_words_token_ids or [] if len(word) == 1}
    if params.min_tokens > 0:
        excluded |= params.all_stop_token_ids
    if len(excluded) >= vocab_size and excluded.issuperset(range(vocab_size)):
        raise VLLMValidationError(
            f"min_tokens = {params.min_tokens}, stop_token_ids and bad_words must leave a token to "
            f"answer with, got all {vocab_size} of the vocabulary. Leave out min_tokens, or some "
            f"of the tokens.",
            parameter="stop_token_ids",
        )
