"""Holds what the model predicts for the rows of a canvas, and legal paths through the rows.

Masks of legal tokens are as llguidance computes them: [W] uint32, one bit for each token (see the
legend in `vllm_dllm.grammar`). Functions whose name ends in `_` change the mask in place.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
