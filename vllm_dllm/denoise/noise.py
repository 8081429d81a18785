"""Counter-based noise: each draw is a pure function of (seed, token position, step, stream).

A request therefore sees the same noise alone, in any batch, and after a preemption. The mixer is
splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014),
written in int64 arithmetic, which wraps.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

CANDIDATE, RENOISE, INITIAL = 0, 1, 2
"""Streams: a step's candidate tokens, the tokens that replace rejected ones, the first canvas."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STEP_STRIDE = 0xD1B54A32D192ED03 - (1 << 64)  # odd, so steps never meet on one counter
_STREAM_STRIDE = 0x2545F4914F6CDD1D


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def keys(seeds: torch.Tensor) -> torch.Tensor:
    """What `uniform` takes of a request's seed, the same shape int64: worked out once a request."""
    return _mix(seeds.long() + _GOLDEN)


def uniform(
    keys: torch.Tensor,  # [..., n] int64
    positions: torch.Tensor,  # [..., n, C] int64, absolute token positions
    steps: torch.Tensor,  # [..., n] int, steps done on this canvas
    stream: int | torch.Tensor,  # a tensor broadcasts against `steps`
) -> torch.Tensor:
    """Uniform numbers [..., n, C] float64 in [0, 1), 53 random bits each.

    Position, step and stream advance one counter by strides of their own.
    """
    origin = keys + steps.long() * _STEP_STRIDE + stream * _STREAM_STRIDE
    bits = _mix(positions.long() * _GOLDEN + origin[..., None])
    return _logical_shift_right(bits, 11).double() * 2.0**-53


def uniform_tokens(
    keys: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n, C] int64
    steps: torch.Tensor,  # [n] int
    stream: int,
    vocab_size: int,
) -> torch.Tensor:
    """Tokens [n, C] int64, uniform over the vocabulary."""
    return (uniform(keys, positions, steps, stream) * vocab_size).long()


class StepNoise(NamedTuple):
    candidate: torch.Tensor  # [n, C] float64 in [0, 1)
    renoise: torch.Tensor  # [n, C] int64, tokens
    next_canvas: torch.Tensor  # [n, C] int64, tokens: the next block's first canvas


@lru_cache
def _step_streams(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[3, 1] int64 each: a step's streams, and whether they go on with the steps."""
    streams = torch.tensor([[CANDIDATE], [RENOISE], [INITIAL]], device=device)
    return streams, (streams != INITIAL).long()


def step_noise(
    keys: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n, C] int64
    steps: torch.Tensor,  # [n] int
    next_positions: torch.Tensor,  # [n, C] int64, of the block after this one
    vocab_size: int,
) -> StepNoise:
    """All that a step draws, in one pass: a pass is some twenty operations, however small."""
    streams, goes_on = _step_streams(keys.device)
    everywhere = torch.stack((positions, positions, next_positions))
    draws = uniform(keys, everywhere, steps * goes_on, streams)
    tokens = (draws[1:] * vocab_size).long()
    return StepNoise(draws[CANDIDATE], *tokens)
