"""Holds what the model predicts for the rows of a canvas, and legal paths through the rows.

Masks of legal tokens [W] uint32 are those of `masks.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

MORE_TOKENS = 512
_ENOUGH_PROBABILITY = 0.9
"""If the K tokens of a row have at least this probability together, a search looks at them
alone."""


@dataclass(frozen=True)
class CanvasRows:
    """The model's predictions for the L rows of a canvas."""

    tokens: np.ndarray  # [L, K] int64, the most probable first
    logprobs: np.ndarray  # [L, K] fp32
    best_legal: Callable[[int, np.ndarray], tuple[int, float]]
    """(row, mask [W] uint32 of at least one token) -> the most probable token of the mask, and its
    log-probability. For rows whose K tokens are all illegal."""
    more: Callable[[int], tuple[np.ndarray, np.ndarray]]
    """row -> its `MORE_TOKENS` most probable tokens [k] int64, the best first, and their
    log-probabilities [k] fp32. For rows whose K tokens have little probability."""

    def candidates(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [k] int64 of a row that a search for a cheap path looks at, and their
        log-probabilities [k] fp32, the most probable first."""
        if np.exp(self.logprobs[row]).sum() >= _ENOUGH_PROBABILITY:
            return self.tokens[row], self.logprobs[row]
        return self.more(row)

    def first(self, num_rows: int) -> "CanvasRows":
        """Returns the predictions for the first `num_rows` rows."""
        return replace(self, tokens=self.tokens[:num_rows], logprobs=self.logprobs[:num_rows])

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class LegalPath:
    """Legal tokens, one for each row beginning at the canvas' first, and facts about these rows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cost_nats: float = 0.0
    """Summed log-probability of the best guesses of the repaired rows, minus that of the path's
    tokens."""
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [W] uint32, the tokens that are legal in it after the path's tokens before it. Rows
    that the model is sure of have no mask: their distribution stays as it is."""
    num_reasoning: int = 0  # how many of the first tokens are reasoning
    forced: set[int] = field(default_factory=set)  # rows that have one legal token
    is_stuck: bool = False  # no token is legal after these, though the answer has not ended
    first_repair: int | None = None
    """The first row whose best guess is illegal; None: no row, or the path is not a walk."""
    confident_cost_nats: float = 0.0
    """The part of `cost_nats` from rows whose best guess is more probable than all other tokens
    together. Only a walk computes it."""
