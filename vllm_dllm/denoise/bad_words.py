"""Words of several tokens that a best guess may not spell.

All words are looked for at all positions at once, so that many cost little more than one.

Legend: W = words, K = tokens of the longest word without its last, L rows = consecutive positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dllm.denoise.row_stats import argmax

_ANY = -2
"""Stands before shorter words, and fits every token."""
_REPAIRS = 8
"""How often the best guess is searched. Each pass excludes all it finds, so another is needed only
if the substitutes are bad words themselves."""
_COMPARED = 1 << 22
"""Tokens that are compared at once, which bounds the memory."""


@dataclass(frozen=True)
class BadWords:
    rests: torch.Tensor  # [W, K] int64, all but the last token of each word, right-aligned
    lasts: torch.Tensor  # [W] int64

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "BadWords":
        """Of words of two tokens and more."""
        longest = max(len(word) for word in words) - 1
        rests = [[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
        return cls(torch.tensor(rests), torch.tensor([word[-1] for word in words]))

    def to(self, device: torch.device) -> "BadWords":
        return BadWords(
            self.rests.to(device, non_blocking=True), self.lasts.to(device, non_blocking=True)
        )

    @property
    def longest(self) -> int:
        """Tokens before a position that matter there."""
        return self.rests.shape[1]

    def exclude_(
        self,
        logits: torch.Tensor,  # [L, V] fp32, changed in place
        before: torch.Tensor,  # [K] int64, the tokens before them; < 0: not the request's
        excluded_logit: float,
    ) -> None:
        """Excludes the last token of each word wherever this step's best guess spells the rest of
        it before, so that the best guess contains none."""
        words_at_once = max(1, _COMPARED // max(len(logits) * self.longest, 1))
        for _ in range(_REPAIRS):
            guess = argmax(logits)
            windows = torch.cat((before, guess)).unfold(0, self.longest, 1)[: len(logits)]
            found = False
            for first in range(0, len(self.lasts), words_at_once):
                words = slice(first, first + words_at_once)
                rests, lasts = self.rests[words], self.lasts[words]
                spelled = ((windows[:, None] == rests) | (rests == _ANY)).all(dim=-1)  # [L, W]
                ceiling = torch.where(spelled, excluded_logit, torch.inf).to(logits.dtype)
                columns = lasts.expand_as(spelled)
                logits.scatter_reduce_(1, columns, ceiling, "amin", include_self=True)
                found = found or _may_hold(spelled & (guess[:, None] == lasts))
            if not found:
                return


def _may_hold(found: torch.Tensor) -> bool:
    """Whether any of `found` is true; on GPUs, which would have to be waited for, perhaps."""
    return found.device.type != "cpu" or bool(found.numpy().any())
