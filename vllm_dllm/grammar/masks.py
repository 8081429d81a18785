"""Sets of tokens as masks [W] uint32, one bit for each token, as llguidance computes them.

The legend in `vllm_dllm.grammar` says which bit is whose. Functions whose name ends in `_` change
the mask in place.
"""

from collections.abc import Iterable

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
