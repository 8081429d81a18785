"""Tokens that a request excludes from its answer, whatever its grammar says."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_dllm.grammar.masks import pack_mask, remove_tokens_

Word = tuple[int, ...]


@dataclass(frozen=True)
class Exclusions:
    """The tokens that one request excludes by `allowed_token_ids` and `bad_words`."""

    vocab_size: int
    allowed: frozenset[int] | None  # None: all tokens
    words: frozenset[Word]  # bad words, each the ids of one token or more

    @cached_property
    def lookback(self) -> int:
        """The number of tokens before a position that decide whether a token completes a bad word
        there."""
        return max((len(word) - 1 for word in self.words), default=0)

    def excludes(self, token: int, previous: Sequence[int]) -> bool:
        """Returns whether `token` must not follow the tokens `previous`."""
        if self.allowed is not None and token not in self.allowed:
            return True
        return (token,) in self.words or token in self._tokens_completing_words(previous)

    def remove_from_(
        self,
        mask: np.ndarray,  # [W] uint32, changed in place
        previous: Sequence[int],
    ) -> None:
        """Removes the tokens that must not follow the tokens `previous` from the mask, in place."""
        mask &= self.allowed_mask
        remove_tokens_(mask, self._tokens_completing_words(previous))

    @cached_property
    def allowed_mask(self) -> np.ndarray:
        """The mask [W] uint32 of the tokens that are allowed and are no bad word by themselves. Bad
        words of several tokens depend on the tokens before them: `remove_from_` handles those."""
        is_allowed = np.full(self.vocab_size, self.allowed is None)
        is_allowed[list(self.allowed or ())] = True
        is_allowed[[word[0] for word in self.words if len(word) == 1]] = False
        return pack_mask(is_allowed)

    @cached_property
    def _words_by_last_but_one(self) -> dict[int, list[Word]]:
        """The bad words of several tokens, by their last token but one. A missing key has no
        words."""
        words: dict[int, list[Word]] = defaultdict(list)
        for word in self.words:
            if len(word) > 1:
                words[word[-2]].append(word)
        return words

    def _tokens_completing_words(self, previous: Sequence[int]) -> set[int]:
        """Returns the tokens that would complete a bad word after the tokens `previous`."""
        words = self._words_by_last_but_one.get(previous[-1], ()) if previous else ()
        return {word[-1] for word in words if tuple(previous[1 - len(word) :]) == word[:-1]}
