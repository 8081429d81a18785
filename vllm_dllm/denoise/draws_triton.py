"""`temperature` and `noise.step_noise` for GPUs: what a step is given for each canvas, in one pass.

Draws are the same bits. They are made of whole numbers, and a draw's 53 bits fit a float64.
"""

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


def temperature_and_noise(
    keys: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64
    lengths: torch.Tensor,  # [n] int64
    steps_done: torch.Tensor,  # [n] int64
    num_steps: torch.Tensor,  # [n] int64
    t_min: float | torch.Tensor,  # for all canvases, or [n] fp32
    t_span: float | torch.Tensor,
    canvas_length: int,
    vocab_size: int,
) -> tuple[torch.Tensor, StepNoise]:
    """`temperature` [n] fp32 and `step_noise`. The tensors [n] may be columns of tables."""
    n = len(keys)
    columns = (keys, steps_done, num_steps)
    assert len({column.stride() for column in columns}) == 1, "columns of one table"
    found = starts.new_empty(n, dtype=torch.float32)
    uniform = starts.new_empty(n, canvas_length, dtype=torch.float64)
    renoise, next_canvas = starts.new_empty(2, n, canvas_length)
    own_pitch = 0
    if isinstance(t_min, torch.Tensor) and isinstance(t_span, torch.Tensor):
        own_pitch = t_min.stride(0)
        assert own_pitch == t_span.stride(0), "columns of one table"
    else:
        t_min, t_span = float(t_min), float(t_span)
    _temperature_and_noise_kernel[(n,)](
        *columns,
        starts.contiguous(),
        lengths.contiguous(),
        t_min,
        t_span,
        found,
        uniform,
        renoise,
        next_canvas,
        keys.stride(0),
        own_pitch,
        canvas_length,
        vocab_size,
        IS_OWN=own_pitch > 0,
        PLACES=triton.next_power_of_2(canvas_length),
    )
    return found, StepNoise(uniform, renoise, next_canvas)


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
    do_not_specialize=["pitch", "own_pitch"],
    do_not_specialize_on_alignment=[
        *("keys", "steps_done", "num_steps", "starts", "lengths", "t_min", "t_span")
    ],
)
def _temperature_and_noise_kernel(
    keys,  # [n] int64, `pitch` apart
    steps_done,
    num_steps,
    starts,  # [n] int64
    lengths,
    t_min,  # [n] fp32, `own_pitch` apart, or a number
    t_span,
    temperature,  # [n] fp32
    uniform,  # [n, C] fp64
    renoise,  # [n, C] int64
    next_canvas,
    pitch,
    own_pitch,
    canvas_length,
    vocab_size,
    IS_OWN: tl.constexpr,
    PLACES: tl.constexpr,
):
    canvas = tl.program_id(0)
    key = tl.load(keys + canvas * pitch)
    done, most = tl.load(steps_done + canvas * pitch), tl.load(num_steps + canvas * pitch)
    start, length = tl.load(starts + canvas), tl.load(lengths + canvas)
    lowest, span = t_min, t_span
    if IS_OWN:
        lowest, span = tl.load(t_min + canvas * own_pitch), tl.load(t_span + canvas * own_pitch)
    remaining = tl.maximum(most - done, 1).to(tl.float32)
    tl.store(temperature + canvas, lowest + span * (remaining / most.to(tl.float32)))

    place = tl.arange(0, PLACES)
    is_place = place < canvas_length
    out = canvas * canvas_length + place
    choices = vocab_size.to(tl.float64)
    origin, position = key + done * _STEP_STRIDE, start + place
    tl.store(uniform + out, _draw(origin, position, 1.0), mask=is_place)
    tokens = _draw(origin + _RENOISE, position, choices)
    tl.store(renoise + out, tokens.to(tl.int64), mask=is_place)
    tokens = _draw(key + _INITIAL, position + length, choices)  # of the next canvas' first step
    tl.store(next_canvas + out, tokens.to(tl.int64), mask=is_place)
