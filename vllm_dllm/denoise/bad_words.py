"""Bad words of several tokens, excluded so that what a canvas spells holds none.

All positions of a canvas are decided together, so the best guess is read from the left: excluded at
a position is every token that completes a word, with the tokens before it and with those behind it
that stand already. Every word has a last token to be decided, so none is ever complete.

This is done on the host: a step of a request with such words waits for the device, once for its
guess and once for each token of it that is replaced.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from vllm_dllm.denoise.impossible import BAD_WORD_LOGIT
from vllm_dllm.denoise.row_stats import argmax

Word = tuple[int, ...]


class BadWords:
    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """Each of two tokens or more."""
        self._by_previous: dict[int, list[Word]] = defaultdict(list)  # than the last token
        self._by_next: dict[int, list[tuple[Word, int]]] = defaultdict(list)  # than that place's
        self.reach = 0
        """Tokens on either side of a position that decide whether one completes a word."""
        for word in map(tuple, words):
            self.reach = max(self.reach, len(word) - 1)
            self._by_previous[word[-2]].append(word)
            for place in range(len(word) - 1):
                self._by_next[word[place + 1]].append((word, place))

    def __bool__(self) -> bool:
        return self.reach > 0

    def completing(self, before: Sequence[int], behind: Sequence[int]) -> set[int]:
        """The tokens that complete a word between these; < 0: no token stands there."""
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
        before: Sequence[int],  # the tokens before them; < 0: not the request's
        kept: Sequence[int],  # the tokens that stand at these rows and behind; < 0: none yet
    ) -> list[int]:
        """Returns what the rows then spell, after the tokens before them."""
        spelled = list(before)
        for row, best in enumerate(argmax(logits).tolist()):
            if kept[row] >= 0:
                spelled.append(kept[row])
                continue
            if bad := self.completing(spelled, kept[row + 1 : row + 1 + self.reach]):
                tokens = torch.tensor(sorted(bad), device=logits.device)
                logits[row, tokens] = logits[row, tokens].clamp(max=BAD_WORD_LOGIT)
                if best in bad:
                    best = int(argmax(logits[row : row + 1]))
            spelled.append(best)
        return spelled

    def exclude_behind_(
        self,
        logits: torch.Tensor,  # [L, V] fp32, changed in place
        before: Sequence[int],  # the tokens before the first row's; < 0: not the request's
        behind: Sequence[int],  # those that later rows' come behind, at least L - 1; < 0: unknown
    ) -> list[int]:
        """Excludes by what comes before alone. Returns that and what is `behind`."""
        spelled = list(before)
        for row in range(len(logits)):
            if bad := self.completing(spelled, ()):
                tokens = torch.tensor(sorted(bad), device=logits.device)
                logits[row, tokens] = logits[row, tokens].clamp(max=BAD_WORD_LOGIT)
            spelled += behind[row : row + 1]
        return spelled
