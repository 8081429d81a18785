"""Sets of tokens as masks [W] uint32, one bit for each token, as llguidance computes them.

The legend in `vllm_dllm.grammar` says which bit is whose. Functions whose name ends in `_` change
the mask in place. `Exclusions` are tokens that a request leaves out, whatever its grammar says.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def pack_mask(is_legal: np.ndarray) -> np.ndarray:
    """Returns the mask [W] uint32 of `is_legal` [V] bool."""
    padded = np.zeros(-(-len(is_legal) // 32) * 32, dtype=bool)
    padded[: len(is_legal)] = is_legal
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpack_mask(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns [V] bool: which tokens are in the mask [W] uint32."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].view(bool)


def mask_of_tokens(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns a new mask [W] uint32 of the tokens `tokens`."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    add_tokens_(mask, tokens)
    return mask


def add_tokens_(mask: np.ndarray, tokens: Iterable[int]) -> None:
    """Sets the bits of the tokens in the mask [W] uint32, in place."""
    for token in tokens:
        mask[token >> 5] |= np.uint32(1 << (token & 31))


def remove_tokens_(mask: np.ndarray, tokens: Iterable[int]) -> None:
    """Clears the bits of the tokens in the mask [W] uint32, in place."""
    for token in tokens:
        mask[token >> 5] &= ~np.uint32(1 << (token & 31))


def has_tokens(mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns [...] bool: which of the tokens [...] int64 are in the mask [W] uint32."""
    return (mask[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 == 1


def has_token(mask: np.ndarray, token: int) -> bool:
    """Returns whether one token is in the mask [W] uint32. It is faster than `has_tokens`."""
    return bool(mask.item(token >> 5) >> (token & 31) & 1)


def only_token(mask: np.ndarray) -> int | None:
    """Returns the token that a grammar forces: the one token in the mask [W] uint32. Returns None
    if the mask has no token or several."""
    bits = int.from_bytes(mask.tobytes(), "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


Word = tuple[int, ...]


@dataclass(frozen=True)
class Exclusions:
    """The tokens that one request excludes by `allowed_token_ids` and `bad_words`."""

    vocab_size: int
    allowed: frozenset[int] | None  # None: all tokens
    words: frozenset[Word]  # bad words, each the ids of one token or more

    @cached_property
    def lookback(self) -> int:
        """How many tokens before a position decide whether a token completes a bad word there."""
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
        """The bad words of several tokens, by their last token but one. Missing keys have none."""
        words: dict[int, list[Word]] = defaultdict(list)
        for word in self.words:
            if len(word) > 1:
                words[word[-2]].append(word)
        return words

    def _tokens_completing_words(self, previous: Sequence[int]) -> set[int]:
        """Returns the tokens that would complete a bad word after the tokens `previous`."""
        words = self._words_by_last_but_one.get(previous[-1], ()) if previous else ()
        return {word[-1] for word in words if tuple(previous[1 - len(word) :]) == word[:-1]}
