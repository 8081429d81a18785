"""The texts of tokens beside their log-probabilities, each found once.

vLLM decodes every token of every log-probability by itself: 20 prompts of 1,000 tokens with 20
alternatives are 420,000 calls of the tokenizer, in the process that serves everybody.
"""

from typing import Any

from vllm_dllm.compat.patching import is_server, replace


def find_token_texts_once() -> None:
    """Repeatable, and nothing in a process that is no server."""
    if not is_server():
        return

    def make(stock: Any) -> Any:
        known: dict[int, tuple[Any, dict[int, str]]] = {}  # by tokenizer, which stays

        def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
            _, texts = known.setdefault(id(tokenizer), (tokenizer, {}))
            if new := [token for token in dict.fromkeys(token_ids) if token not in texts]:
                texts.update(zip(new, stock(tokenizer, new), strict=True))
            return [texts[token] for token in token_ids]

        return convert_ids_list_to_tokens

    replace("v1.engine.logprobs:convert_ids_list_to_tokens", make)
