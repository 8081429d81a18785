"""Applies a request's sampling parameters to the logits of its canvas, before the temperature.

Biases and penalties come first, in vLLM's order. Exclusions come last, so that no bias brings a
token back: tokens that are never allowed, early stop tokens, bad words.

All positions of a canvas are decided together, so "generated so far" needs a definition: at
position i it is the blocks committed before, and the last step's best guess at positions before i.

Legend: C = canvas length, V = vocabulary size, L rows = consecutive positions of one canvas.
"""

from dataclasses import dataclass, field

import torch

from vllm_dllm.denoise.bad_words import BadWords, DrawTokens
from vllm_dllm.denoise.impossible import LARGEST_LOGIT, MASKED_LOGIT, TRUNCATED_LOGIT


@dataclass
class Penalties:
    """The presence, frequency and repetition penalties of one request."""

    presence: float
    frequency: float
    repetition: float
    counts: torch.Tensor  # [V] fp32, how often each token was committed so far
    in_prompt: torch.Tensor  # [V] bool

    def apply_(
        self,
        logits: torch.Tensor,  # [L, V] fp32
        first: int,  # canvas position of the first row
        guess: torch.Tensor,  # [C] int64, the last step's best guess; NO_TOKEN: none yet
    ) -> None:
        """Applies the penalties to rows of a canvas, in place. A row counts the emitted tokens, and
        the guess at the positions before its own."""
        L, C = len(logits), len(guess)
        position = torch.arange(max(C, first + L), device=guess.device)
        is_before = position[:C] < position[first : first + L, None]
        counted = (is_before & (guess >= 0)).to(logits.dtype)
        own = torch.zeros_like(logits).scatter_add_(1, guess.clamp(min=0).expand(L, C), counted)
        generated = own.add_(self.counts)
        if self.repetition != 1.0:
            scaled = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits.copy_(torch.where((generated > 0) | self.in_prompt, scaled, logits))
        if self.frequency != 0.0:
            # Not `alpha=`, which some builds and processors fuse with the sum in whole vectors or
            # everywhere: a row's rounding must not depend on where in the step it lies.
            logits.sub_(generated * self.frequency)
        if self.presence != 0.0:
            logits.sub_((generated > 0) * self.presence)

    def count_tokens_(self, block: torch.Tensor, is_emitted: torch.Tensor) -> None:
        """Adds the tokens of a block [C] int64 to `counts`, in place, where `is_emitted` [C] bool.
        Skips NO_TOKEN."""
        counted = (is_emitted & (block >= 0)).to(self.counts.dtype)
        self.counts.scatter_add_(0, block.clamp(min=0), counted)


@dataclass
class LogitRules:
    """The rules of one request. All tensors are on the device of the logits."""

    bias: torch.Tensor | None = None  # [V] fp32
    penalties: Penalties | None = None
    excluded: torch.Tensor | None = None  # [V] bool, tokens that are never allowed
    early_stops: torch.Tensor | None = None  # [k] int64, tokens that may not come ...
    stops_from: int = 0  # ... before this absolute position
    bad_words: BadWords = field(default_factory=lambda: BadWords(()))  # of several tokens

    def __bool__(self) -> bool:
        """Returns whether there is any rule."""
        several = (self.bias, self.penalties, self.excluded, self.early_stops)
        return bool(self.bad_words) or any(rule is not None for rule in several)

    def apply_(
        self,
        logits: torch.Tensor,  # [L, V] fp32, changed in place
        first: int,  # canvas position of the first row
        start: torch.Tensor,  # [] int64, absolute position of the canvas' first token
        guess: torch.Tensor,  # [C] int64, the last step's best guess
    ) -> None:
        """Applies all rules in place but bad words of several tokens, which need rows before."""
        if self.bias is not None:
            logits.add_(self.bias)
        if self.penalties is not None:
            self.penalties.apply_(logits, first, guess)
        if self.bias is not None or self.penalties is not None:
            logits.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
        if self.excluded is not None:
            logits.masked_fill_(self.excluded, MASKED_LOGIT)
        if self.early_stops is not None:
            position = start + first + torch.arange(len(logits), device=logits.device)
            is_early = (position < self.stops_from)[:, None]
            stops = logits[:, self.early_stops].masked_fill(is_early, MASKED_LOGIT)
            logits[:, self.early_stops] = stops


class CanvasRules:
    """Applies a request's rules to the rows of its canvas, from the left, some at a time."""

    def __init__(
        self,
        rules: LogitRules,
        start: torch.Tensor,  # [] int64, absolute position of the canvas' first token
        guess: torch.Tensor,  # [C] int64, the last step's best guess
        before: torch.Tensor,  # [w] int64, the tokens before the canvas; < 0: not the request's
        kept: torch.Tensor
        | None = None,  # [C] int64, revealed for good; < 0: none yet, None: nowhere
        lead: torch.Tensor | None = None,  # [] int64, how many positions ahead a row predicts, 0 or
        # 1, from the kept tokens up to its own. None: rows predict their own positions, always
        draw: DrawTokens | None = None,  # None: rows take their best guesses
    ) -> None:
        self.rules, self.start, self.guess, self._draw = rules, start, guess, draw
        self._first = 0  # canvas position of the next row
        self._predicts_next = lead is not None
        if lead is not None and kept is not None:
            self._first, self.start, self.guess = 1, start - 1 + lead, kept
        if rules.bad_words:
            self._spelled = before.tolist()  # up to that row
            self._kept = [-1] * len(guess) if kept is None else kept.tolist()
            if self._predicts_next:
                self._spelled.append(self._kept[0])

    def apply_(self, logits: torch.Tensor) -> None:
        """Applies the rules to the next L rows, `logits` [L, V] fp32, in place. Waits for the
        device if there are bad words of several tokens."""
        self.rules.apply_(logits, self._first, self.start, self.guess)
        if self.rules.bad_words:
            kept, words, before = self._kept[self._first :], self.rules.bad_words, self._spelled
            if self._predicts_next:
                self._spelled = words.exclude_in_next_token_rows_(logits, before, kept)
            else:
                self._spelled = words.exclude_(logits, before, kept, self._draw, self._first)
        self._first += len(logits)


def exclude_below_min_p_(
    logits: torch.Tensor,  # [rows, V] fp32, temperature-scaled, changed in place
    min_p: torch.Tensor,  # [rows, 1] fp32, share of the largest probability; 0 = none
) -> None:
    """Excludes, in place, the tokens whose probability is below `min_p` times the row's largest."""
    lowest = logits.amax(dim=-1, keepdim=True) + min_p.log()
    logits.masked_fill_(logits < lowest, TRUNCATED_LOGIT)
