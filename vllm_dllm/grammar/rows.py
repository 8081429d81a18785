"""What a model says of the rows of a canvas, as far as a walk needs it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

BestLegal = Callable[[int, np.ndarray], tuple[int, float]]
"""Of a row and the mask [W] of its legal tokens, of which there are some: the most probable one,
and its log-probability."""


MoreTokens = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Of a row: its `DEEP` most probable tokens [k] int64, the best first, and their log-probabilities
[k] fp32."""
DEEP = 512
CLEAR = 0.9
"""The probability from which on the K tokens of a row say enough of it."""


@dataclass(frozen=True)
class CanvasRows:
    tokens: np.ndarray  # [L, K] int64, the most probable first
    logprobs: np.ndarray  # [L, K] fp32
    best_legal: BestLegal  # for rows whose K tokens are all illegal
    more: MoreTokens  # for rows whose K tokens leave much open

    def of_row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens worth a look for a path that is to be cheap, and their log-probabilities."""
        if np.exp(self.logprobs[row]).sum() >= CLEAR:
            return self.tokens[row], self.logprobs[row]
        return self.more(row)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Path:
    """The tokens that a canvas stands for: legal, from its first row on, one per row."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cost_nats: float = 0.0
    """How much less probable they are than the rows' best guesses."""
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> [W] uint32, the legal tokens behind the path's tokens before it. Rows that the model
    is sure of have none: their distribution stays as it is."""
    num_reasoning: int = 0
    """How many of its first tokens are reasoning."""
    forced: set[int] = field(default_factory=set)
    """Rows that have one legal token."""
    is_stuck: bool = False
    """No token is legal behind them, and the answer has not ended."""
    first_repair: int | None = None
    """The first row whose best guess is illegal."""
    confident_cost_nats: float = 0.0
    """Of the repairs where the best guess is more probable than all others together."""
