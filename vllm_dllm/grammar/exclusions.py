"""Tokens that an answer may not have, whatever its grammar says."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Word = tuple[int, ...]


@dataclass(frozen=True)
class Exclusions:
    """What one request excludes."""

    vocab_size: int
    allowed: frozenset[int] | None  # None: all tokens
    words: frozenset[Word]  # of one token or more; none is ever spelt

    @cached_property
    def reach(self) -> int:
        """Tokens before a position that decide whether a token completes a word there."""
        return max((len(word) - 1 for word in self.words), default=0)

    def excludes(self, token: int, before: Sequence[int]) -> bool:
        """Whether `token` may not follow the tokens `before`."""
        if self.allowed is not None and token not in self.allowed:
            return True
        return (token,) in self.words or token in self._completing(before)

    def remove_from(
        self,
        mask: np.ndarray,  # [W] uint32, a bit for each token, changed in place
        before: Sequence[int],
    ) -> None:
        """Leaves the tokens that may follow the tokens `before`."""
        mask &= self.allowed_mask
        for token in self._completing(before):
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))

    @cached_property
    def allowed_mask(self) -> np.ndarray:
        """[W] uint32, a bit for each token: set where it is allowed and is no excluded word by
        itself. Words of several tokens depend on what is before them, see `remove_from`."""
        padded = np.zeros(-(-self.vocab_size // 32) * 32, dtype=bool)
        padded[: self.vocab_size] = self.allowed is None
        for token in self.allowed or ():
            padded[token] = True
        for word in self.words:
            if len(word) == 1:
                padded[word[0]] = False
        return np.packbits(padded, bitorder="little").view(np.uint32)

    @cached_property
    def _by_previous(self) -> dict[int, list[Word]]:
        """Words of several tokens, by the last token but one."""
        found: dict[int, list[Word]] = defaultdict(list)
        for word in self.words:
            if len(word) > 1:
                found[word[-2]].append(word)
        return found

    def _completing(self, before: Sequence[int]) -> set[int]:
        """The tokens that complete a word behind the tokens `before`."""
        words = self._by_previous.get(before[-1], ()) if before else ()
        return {word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]}
