"""What the tokens of a canvas say, one by one. Each is decoded once."""

from typing import Any


class TokenTexts:
    """Decodes tokens. Special ones say nothing; part of a character is U+FFFD."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = dict.fromkeys(tokenizer.all_special_ids, "")

    def __call__(self, token_ids: list[int]) -> list[str]:
        texts = self._texts
        for token in token_ids:
            if token not in texts:
                texts[token] = self._tokenizer.decode([token], skip_special_tokens=True)
        return [texts[token] for token in token_ids]
