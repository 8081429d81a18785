"""Refuses sampling parameters that no sampler can serve.

vLLM's sampler, which serves the targets of drafters, checks some parameters only in the worker. An
error there ends the engine and everybody's requests. All checks here raise VLLMValidationError,
which becomes HTTP 400.
"""

import math
import reprlib

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.compat.admission import MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS, max_bad_word_tokens

SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**63 - 1
LARGEST_PENALTY = 1e6
"""The largest repetition penalty. A logit in fp32 that is multiplied or divided by it stays finite
and does not become 0."""


def check_numbers(params: SamplingParams) -> None:
    """Checks the numbers of a request for any model. Raises VLLMValidationError for a seed beyond
    64 bits, or a number that would make logits infinite or NaN."""
    last = params.n - 1  # answer i, counted from 0, has the seed + i
    if params.seed is not None and not SMALLEST_SEED <= params.seed <= LARGEST_SEED - last:
        raise VLLMValidationError(
            f"seed must be from {SMALLEST_SEED} to {LARGEST_SEED - last} for n = {params.n}, got "
            f"{params.seed}. Take a smaller one.",
            parameter="seed",
        )
    penalty = params.repetition_penalty
    if not 1 / LARGEST_PENALTY <= penalty <= LARGEST_PENALTY:
        raise VLLMValidationError(
            f"repetition_penalty must be from {1 / LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}, got "
            f"{penalty!r}. 1 is none, and 2 is much.",
            parameter="repetition_penalty",
        )
    for token, value in (params.logit_bias or {}).items():
        if not math.isfinite(value):
            raise VLLMValidationError(
                f"logit_bias must be numbers from -100 to 100, got {value!r} for token {token}. "
                f"Use allowed_token_ids or bad_words to exclude tokens.",
                parameter="logit_bias",
            )


def check_sampler_limits(params: SamplingParams) -> None:
    """Checks a request for a model that vLLM's sampler serves, once its bad words are tokens.
    Raises VLLMValidationError for a list of tokens for which the sampler has no room."""
    stops = params.all_stop_token_ids if params.min_tokens > 0 else ()
    bad_words = sum(map(len, params.bad_words_token_ids or ()))
    for key, count, most, remedy in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ALLOWED_TOKENS, ""),
        ("stop_token_ids", len(stops), MAX_STOP_TOKENS, ", or leave out min_tokens"),
        ("bad_words", bad_words, max_bad_word_tokens(), ""),
    ):
        if count > most:
            raise VLLMValidationError(
                f"{key} must have at most {most} tokens on this server, got {count}. Name "
                f"fewer{remedy}.",
                parameter=key,
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
        raise VLLMValidationError(
            f"{key} must leave a token that {' and '.join(culprits)} do not exclude, got "
            f"{reprlib.repr(sorted(allowed))} with "
            + " and ".join(f"{name} = {getattr(params, name)!r}" for name in culprits)
            + ". Allow another token, or leave out one of them.",
            parameter=key,
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
