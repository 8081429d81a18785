"""Counter-based noise: each draw is a pure function of (seed, token position, step, stream).

A request therefore gets the same noise alone, in any batch, and after a preemption. The mixer is
splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014),
written in int64 arithmetic, which wraps.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

CANDIDATE, RENOISE, INITIAL, ESCAPE = 0, 1, 2, 3
"""Streams, one for each use: a step's candidates, the tokens that replace rejected ones, the first
canvas, the tokens that get a block out of a loop (`LevenshteinStep`)."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STEP_STRIDE = 0xD1B54A32D192ED03 - (1 << 64)  # odd, so steps never meet on one counter
_STREAM_STRIDE = 0x2545F4914F6CDD1D


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns int64 `x` shifted right by `bits` with zeros coming in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Returns a hash of each number, int64 to int64: splitmix64's mixer."""
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def keys_from_seeds(seeds: torch.Tensor) -> torch.Tensor:
    """Returns `uniform`'s keys, int64 of the shape of `seeds`. Called once a request."""
    return _mix(seeds.long() + _GOLDEN)


def uniform(
    keys: torch.Tensor,  # [..., n] int64
    positions: torch.Tensor,  # [..., n, C] int64, absolute positions of tokens
    steps: torch.Tensor,  # [..., n] int, steps already done on this canvas
    stream: int | torch.Tensor,  # a tensor broadcasts against `steps`
) -> torch.Tensor:
    """Returns uniform numbers [..., n, C] float64 in [0, 1), with 53 random bits each. Position,
    step and stream each advance one counter by a stride of their own. `draws_triton`
    gives the same bits: change both together."""
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
    """Returns tokens [n, C] int64, uniform over the vocabulary, by the numbers of `uniform`."""
    return (uniform(keys, positions, steps, stream) * vocab_size).long()


class StepNoise(NamedTuple):
    """The noise that a step of n canvases uses."""

    candidate: torch.Tensor  # [n, C] float64 in [0, 1), by which candidates are drawn
    renoise: torch.Tensor  # [n, C] int64, tokens that replace rejected ones
    next_canvas: torch.Tensor  # [n, C] int64, tokens of the next block's first canvas


@lru_cache
def _step_constants(
    canvas_length: int, vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each stream and each position of a canvas adds to a counter, [3, 1, C] int64,
    and the factor of each stream's 53 random bits, [3, 1, 1] float64."""
    streams = torch.arange(3, device=device)[:, None, None]  # CANDIDATE, RENOISE, INITIAL
    along_canvas = torch.arange(canvas_length, device=device) * _GOLDEN
    choices = torch.where(streams == CANDIDATE, 1, vocab_size)
    return streams * _STREAM_STRIDE + along_canvas, choices.double() * 2.0**-53


def step_noise(
    keys: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64, absolute position of each canvas' first token
    lengths: torch.Tensor,  # [n] int64, how far after that the next canvas starts
    steps: torch.Tensor,  # [n] int64
    canvas_length: int,
    vocab_size: int,
) -> StepNoise:
    """Returns all noise that a step draws, with the bits of `uniform` and `uniform_tokens`, in one
    pass: on small batches every operation costs the same, however little it does."""
    origin = keys.add(starts, alpha=_GOLDEN)
    of_step = origin.add(steps, alpha=_STEP_STRIDE)
    of_next = origin.add(lengths, alpha=_GOLDEN)  # the next canvas is drawn for its step 0
    counters, factors = _step_constants(canvas_length, vocab_size, keys.device)
    bits = _mix(torch.stack((of_step, of_step, of_next))[..., None] + counters)
    drawn = _logical_shift_right(bits, 11) * factors
    return StepNoise(drawn[CANDIDATE], *drawn[RENOISE:].long())
