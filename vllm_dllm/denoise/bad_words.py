"""Excludes tokens that would complete a bad word of several tokens in a canvas.

All positions of a canvas are decided together, so the tokens that they would take are read from
the left: best guesses, or the tokens that are drawn. At each position, every token is excluded that
completes a word with the tokens before it and the tokens already fixed behind it. Each word has a
token that is decided last, so no word is ever complete.

This is done on the host: a step of a request with such words waits for the device, once for its
tokens and once for each of them that is replaced, or drawn among fewer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from vllm_dllm.denoise.impossible import BAD_WORD_LOGIT
from vllm_dllm.denoise.row_stats import argmax

Word = tuple[int, ...]
DrawTokens = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [k, V] of consecutive rows of a canvas, the first of these rows) -> the tokens [k] int64
that are drawn from them."""


class BadWords:
    """The bad words of one request that have two tokens or more."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """`words`: the token ids of each word, two or more a word. There may be no words."""
        # Words by their last token but one; words and a place in them, by the token behind it.
        self._by_previous: dict[int, list[Word]] = defaultdict(list)
        self._by_next: dict[int, list[tuple[Word, int]]] = defaultdict(list)
        self.reach = 0
        """How many tokens on either side of a position decide whether a token completes a word."""
        for word in map(tuple, words):
            self.reach = max(self.reach, len(word) - 1)
            self._by_previous[word[-2]].append(word)
            for place in range(len(word) - 1):
                self._by_next[word[place + 1]].append((word, place))

    def __bool__(self) -> bool:
        """Returns whether there is any word."""
        return self.reach > 0

    def completing_tokens(self, before: Sequence[int], behind: Sequence[int]) -> set[int]:
        """Returns the tokens that complete a word between the tokens `before` and `behind` a
        position. Numbers < 0 in either are no tokens."""
        found = set()
        for word in self._by_previous.get(before[-1], ()) if before else ():
            if tuple(before[1 - len(word) :]) == word[:-1]:
                found.add(word[-1])
        for word, place in self._by_next.get(behind[0], ()) if behind else ():
            rest = word[place + 1 :]
            if tuple(behind[: len(rest)]) == rest and (
                place == 0 or tuple(before[-place:]) == word[:place]
            ):
                found.add(word[place])
        return found

    def exclude_(
        self,
        logits: torch.Tensor,  # [L, V] fp32, changed in place
        before: Sequence[int],  # the tokens before the rows; < 0: not the request's
        kept: Sequence[int],  # the tokens fixed at these rows and behind; < 0: none yet
        draw: DrawTokens | None = None,  # None: rows take their best guesses
        first: int = 0,  # row of the canvas
    ) -> list[int]:
        """Excludes the tokens that complete a word, row by row. Returns `before` followed by the
        tokens that the rows then take. Waits for the device."""
        spelled = list(before)
        taken = argmax(logits) if draw is None else draw(logits, first)
        for row, token in enumerate(taken.tolist()):
            if kept[row] >= 0:
                spelled.append(kept[row])
                continue
            if bad := self.completing_tokens(spelled, kept[row + 1 : row + 1 + self.reach]):
                tokens = torch.tensor(sorted(bad), device=logits.device)
                logits[row, tokens] = logits[row, tokens].clamp(max=BAD_WORD_LOGIT)
                left = logits[row : row + 1]
                if draw is not None:  # what is excluded moves the other tokens' shares
                    token = int(draw(left, first + row))
                elif token in bad:
                    token = int(argmax(left))
            spelled.append(token)
        return spelled

    def spelling_changes(
        self,
        before: Sequence[int],  # the tokens before the rows; < 0: not the request's
        tokens: Sequence[int],  # of all rows, without the changes; they complete no word
        changes: Mapping[int, int],  # row -> another token for it
    ) -> list[int]:
        """Returns the rows of `changes` that must keep their tokens. Rows are changed from the
        left, and such a row's change would complete a word."""
        spelled, spelling = [*before, *tokens], []
        for row in sorted(changes):
            place = len(before) + row
            behind = spelled[place + 1 : place + 1 + self.reach]
            if changes[row] in self.completing_tokens(spelled[:place], behind):
                spelling.append(row)
            else:
                spelled[place] = changes[row]
        return spelling

    def exclude_in_next_token_rows_(
        self,
        logits: torch.Tensor,  # [L, V] fp32, changed in place
        before: Sequence[int],  # the tokens before the first row's; < 0: not the request's
        behind: Sequence[int],  # the canvas' tokens from the second row on, at least L - 1
    ) -> list[int]:
        """Excludes, in rows that predict the next position's token, the tokens that complete a word
        with the tokens before them. Returns `before` followed by the canvas' tokens up to the next
        row's; < 0 where unknown."""
        spelled = list(before)
        for row in range(len(logits)):
            if bad := self.completing_tokens(spelled, ()):
                tokens = torch.tensor(sorted(bad), device=logits.device)
                logits[row, tokens] = logits[row, tokens].clamp(max=BAD_WORD_LOGIT)
            spelled += behind[row : row + 1]
        return spelled
