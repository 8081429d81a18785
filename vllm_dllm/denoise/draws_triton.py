"""`temperature` and `noise.step_noise` for GPUs, in one kernel.

Draws have the same bits as there: they are computed in integers, and a draw's 53 bits fit a
float64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.noise import StepNoise

_GOLDEN = tl.constexpr(noise._GOLDEN)
_MIX_1, _MIX_2 = tl.constexpr(noise._MIX_1), tl.constexpr(noise._MIX_2)
_STEP_STRIDE = tl.constexpr(noise._STEP_STRIDE)
_RENOISE = tl.constexpr(noise.RENOISE * noise._STREAM_STRIDE)
_INITIAL = tl.constexpr(noise.INITIAL * noise._STREAM_STRIDE)
assert noise.CANDIDATE == 0, "the kernel adds nothing for it"


class StepDraws(NamedTuple):
    """The temperature and the noise of a step's n canvases."""

    temperature: torch.Tensor  # [n, C] fp32, the same all along a canvas
    starts: torch.Tensor  # [n] int64, absolute position of each canvas' first token
    noise: StepNoise


def temperature_and_noise(
    slots: torch.Tensor,  # [n] int64, each canvas' row in the tables
    ends: torch.Tensor,  # [n] int, absolute position after each canvas' last token
    lengths: torch.Tensor,  # [n] int64
    numbers: tuple[torch.Tensor, ...],  # [R] int64, columns of one table: noise keys, steps done,
    # most steps
    schedule: tuple[torch.Tensor, ...],  # [R] fp32, columns of one table: `t_min`, `t_span`
    canvas_length: int,
    vocab_size: int,
) -> StepDraws:
    """Returns what `temperature` and `step_noise` compute, in one launch, which reads the slots'
    tables."""
    n = len(slots)
    pitches = [{column.stride(0) for column in columns} for columns in (numbers, schedule)]
    assert all(len(pitch) == 1 for pitch in pitches), "columns of one table"
    found = schedule[0].new_empty(n, canvas_length)
    uniform = slots.new_empty(n, canvas_length, dtype=torch.float64)
    renoise, next_canvas = slots.new_empty(2, n, canvas_length)
    starts = slots.new_empty(n)
    _temperature_and_noise_kernel[(n,)](
        slots,
        ends,
        lengths,
        *numbers,
        *schedule,
        found,
        starts,
        uniform,
        renoise,
        next_canvas,
        numbers[0].stride(0),
        schedule[0].stride(0),
        canvas_length,
        vocab_size,
        PLACES=triton.next_power_of_2(canvas_length),
    )
    return StepDraws(found, starts, StepNoise(uniform, renoise, next_canvas))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _draw(origin, position, choices):
    """`noise.uniform` times `choices`: float64."""
    bits = _mix(position * _GOLDEN + origin)
    return ((bits >> 11) & ((1 << 53) - 1)).to(tl.float64) * (choices * 2.0**-53)


# The columns of a table begin wherever they do: numbers, of which a program reads one each.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("slots", "ends", "lengths", "keys", "steps_done", "num_steps", "t_min", "t_span")
    ],
)
def _temperature_and_noise_kernel(
    slots,  # [n] int64
    ends,
    lengths,
    keys,  # [R] int64, `pitch` apart
    steps_done,
    num_steps,
    t_min,  # [R] fp32, `schedule_pitch` apart
    t_span,
    temperature,  # [n, C] fp32
    starts,  # [n] int64
    uniform,  # [n, C] fp64
    renoise,  # [n, C] int64
    next_canvas,
    pitch,
    schedule_pitch,
    canvas_length,
    vocab_size,
    PLACES: tl.constexpr,
):
    canvas = tl.program_id(0)
    slot, length = tl.load(slots + canvas), tl.load(lengths + canvas)
    start = tl.load(ends + canvas).to(tl.int64) - length
    key = tl.load(keys + slot * pitch)
    done, most = tl.load(steps_done + slot * pitch), tl.load(num_steps + slot * pitch)
    lowest = tl.load(t_min + slot * schedule_pitch)
    span = tl.load(t_span + slot * schedule_pitch)
    tl.store(starts + canvas, start)

    place = tl.arange(0, PLACES)
    is_place = place < canvas_length
    out = canvas * canvas_length + place
    remaining = tl.maximum(most - done, 1).to(tl.float32)
    of_step = lowest + span * (remaining / most.to(tl.float32))
    tl.store(temperature + out, tl.zeros((PLACES,), tl.float32) + of_step, mask=is_place)

    choices = vocab_size.to(tl.float64)
    origin, position = key + done * _STEP_STRIDE, start + place
    tl.store(uniform + out, _draw(origin, position, 1.0), mask=is_place)
    tokens = _draw(origin + _RENOISE, position, choices)
    tl.store(renoise + out, tokens.to(tl.int64), mask=is_place)
    tokens = _draw(key + _INITIAL, position + length, choices)  # of the next canvas' first step
    tl.store(next_canvas + out, tokens.to(tl.int64), mask=is_place)
