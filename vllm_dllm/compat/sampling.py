"""The room that vLLM's sampler has for a request's lists. More than that raises in the worker."""

from vllm import envs

# Of `vllm/v1/worker/gpu/sample/logit_bias.py`, whose import takes the worker's modules along.
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_TOKENS = 128


def most_bad_word_tokens() -> int:
    """The most that all bad words may have together; an environment variable sets it."""
    return envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
