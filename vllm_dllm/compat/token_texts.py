"""The texts of tokens beside their log-probabilities, each found once.

vLLM decodes every token of every log-probability by itself: 20 prompts of 1,000 tokens with 20
alternatives are 420,000 calls of the tokenizer, in the process that serves everybody.
"""

import sys
from typing import Any


def find_token_texts_once() -> None:
    """Repeatable, and nothing in a process that is no server."""
    if "vllm.entrypoints.launchers.launcher" not in sys.modules:
        return
    from vllm.v1.engine import logprobs

    stock_convert: Any = logprobs.convert_ids_list_to_tokens
    if stock_convert.__module__ == __name__:
        return
    known: dict[int, tuple[Any, dict[int, str]]] = {}  # by tokenizer, which stays

    def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
        _, texts = known.setdefault(id(tokenizer), (tokenizer, {}))
        if new := [token for token in dict.fromkeys(token_ids) if token not in texts]:
            texts.update(zip(new, stock_convert(tokenizer, new), strict=True))
        return [texts[token] for token in token_ids]

    logprobs.convert_ids_list_to_tokens = convert_ids_list_to_tokens
