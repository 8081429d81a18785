"""The random numbers of vLLM's sampling kernels (`sample/gumbel.py`) in NumPy: uniform ones bit for
bit, Gumbel noise up to the rounding of a logarithm.

A draw depends on the request's seed, the token's position and, where each token of the vocabulary
has its own draw, the token id. So a native kernel picks the same token as the Triton kernel.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MASK = np.uint64(0xFFFFFFFF)
_SECOND_STREAM = 0x9E3779B9  # of the upper 32 bits of an fp64 draw
"""Domain of the hash for the upper 32 bits of an fp64 draw."""
_SMALLEST_PHILOX = np.float32(4.6566127342e-10)


def _as_uint64(integers: Array) -> Array:
    """Returns int64 numbers as uint64 of the same bits."""
    return integers.astype(np.int64).view(np.uint64)


def _rotate_left(x: Array, bits: int) -> Array:
    """Returns uint32 numbers with their bits rotated to the left by `bits`."""
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _mix_murmur3(h: Array, key: Array) -> Array:
    """Returns MurmurHash3's hash `h` after four more bytes, `key`: both uint32."""
    key = _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur3(seeds: Array, positions: Array, tokens: Array, domain: int = 0) -> Array:
    """Returns uint32 hashes of `seeds`, `positions` and the lower halves of `tokens`, all int64 and
    broadcast against each other. `domain`: the hash to begin with."""
    with np.errstate(over="ignore"):
        seeds, positions = _as_uint64(seeds), _as_uint64(positions)
        h = np.full(seeds.shape, domain, np.uint32)
        h = _mix_murmur3(h, (seeds & _MASK).astype(np.uint32))
        h = _mix_murmur3(h, (seeds >> np.uint64(32)).astype(np.uint32))
        h = _mix_murmur3(h, (positions & _MASK).astype(np.uint32))
        h = _mix_murmur3(h, tokens.astype(np.uint32)) ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))


def gumbel_noise(seeds: Array, positions: Array, tokens: Array, fp64: bool) -> Array:
    """Returns Gumbel noise, fp64 or fp32, for `seeds`, `positions` and `tokens`, all int64 and
    broadcast. In fp32 the large values, which decide, have the finest steps."""
    if fp64:
        low = murmur3(seeds, positions, tokens).astype(np.uint64)
        high = murmur3(seeds, positions, tokens, _SECOND_STREAM).astype(np.uint64)
        bits = ((high << np.uint64(32)) | low) >> np.uint64(11)  # 53 of them
        uniform = (bits.astype(np.float64) + 0.5) * 1.1102230246251565e-16
        uniform = np.where(uniform == 1.0, uniform - 1.1102230246251565e-16, uniform)
        return -np.log(-np.log(uniform))
    bits = murmur3(seeds, positions, tokens)
    upper = (bits >> np.uint32(16)).astype(np.float32) * np.float32(1.52587890625e-05)
    lower = (bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    uniform = upper + lower * np.float32(2.3283064365386963e-10)
    return -np.log(-np.log1p(-uniform))


def philox_uniform(seeds: Array, positions: Array) -> Array:
    """Returns fp32 draws in (0, 1) from int64 arrays of one shape: Triton's `tl.rand`, never
    zero."""
    seeds, positions = _as_uint64(seeds), _as_uint64(positions)
    key0, key1 = seeds & _MASK, seeds >> np.uint64(32)
    c0, c1 = positions & _MASK, positions >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        # Products of 32 bits each, in 64: upper and lower half.
        b, a = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        c0, c2 = (b >> np.uint64(32)) ^ c1 ^ key0, (a >> np.uint64(32)) ^ c3 ^ key1
        c1, c3 = b & _MASK, a & _MASK
        key0 = (key0 + np.uint64(0x9E3779B9)) & _MASK
        key1 = (key1 + np.uint64(0xBB67AE85)) & _MASK
    signed = c0.astype(np.uint32).view(np.int32)
    magnitude = np.where(signed < 0, ~signed, signed).astype(np.float32)
    return np.maximum(magnitude * _SMALLEST_PHILOX, _SMALLEST_PHILOX)
