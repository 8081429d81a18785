"""Settles plain canvases on GPUs: accepts candidates, decides what becomes of each canvas, and
writes its slot, in two kernels.

They do what `denoise_step`, `Settling.settle` and `Settling.write_slots` do, to the bit: a step
whose canvases are not all plain runs those, and no canvas may depend on its neighbours. So both sum
entropies in float64 (`sum_dtype`), where the order of additions makes no difference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dllm.config.step_sizes import WIDTH_STEP
from vllm_dllm.denoise.noise import StepNoise
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.requests.ends import EVERY_BLOCK, MAX_FORESEEN_STOPS
from vllm_dllm.step.asked.settings import Settings, SlotSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers

NAMES = ("step", "accepted", "entropy", "denoises", "finished", "converged")
"""The names of the numbers that are counted of each canvas, see `CanvasNumbers`."""


class Emits(NamedTuple):
    """Says which blocks the step that finishes them emits, see `Settling._emits_at_once`."""

    last: bool  # a request's last block
    others: bool  # all blocks before it


class PlainSettled(NamedTuple):
    """What became of n canvases. The rest is in their slots."""

    told: torch.Tensor  # [n * C + 2 * n] int32: `best_guess`, `emitted`, `rejected`
    flags: torch.Tensor  # [3, n] bool: blocks after which another one starts, `at_once`, `cut`
    counted: torch.Tensor  # [NAMES, n] fp32, for `CanvasNumbers`

    @property
    def best_guess(self) -> torch.Tensor:
        """Returns [n, C] int32: best guesses, or the emitted tokens of canvases that commit."""
        n = self.flags.shape[1]
        return self.told[: -2 * n].view(n, -1)

    @property
    def emitted(self) -> torch.Tensor:
        """Returns [n] int32: how many tokens of `best_guess` join the answer."""
        n = self.flags.shape[1]
        return self.told[-2 * n : -n]

    @property
    def rejected(self) -> torch.Tensor:
        """Returns [n] int32: how many tokens later steps compute again."""
        return self.told[-self.flags.shape[1] :]

    @property
    def at_once(self) -> torch.Tensor:
        """Returns [n] bool: blocks that this step both decides and emits."""
        return self.flags[1]

    @property
    def cut(self) -> torch.Tensor:
        """Returns [n] bool: canvases of which the scheduler ran too few or too many rows
        (`CanvasStep._cut_canvases`). Nothing in their slots has changed."""
        return self.flags[2]


def settle(
    stats: RowStats,  # fields [rows]
    drawn: StepNoise,
    batch: CanvasBatch,
    block_ends: torch.Tensor,  # [n] int32 or int64, absolute position after each canvas
    max_model_len: int,
    slots: CanvasSlots,  # changed in place, but for `soft_embeds`
    settings: SlotSettings,
    emits: Emits,
    *,
    keeps_emitted: bool,  # emitted tokens need no prefill
) -> PlainSettled:
    """Settles the canvases and writes their slots in one kernel, with a program for each canvas.
    Does not wait for the device."""
    n, C = batch.num_canvases, batch.canvas_length
    device = slots.canvas.device
    settled = PlainSettled(
        told=torch.empty(n * C + 2 * n, dtype=torch.int32, device=device),
        flags=torch.empty(3, n, dtype=torch.bool, device=device),
        counted=torch.empty(len(NAMES), n, dtype=torch.float32, device=device),
    )
    stages = settings.load
    _settle_kernel[(n,)](
        stats.best_guess,
        stats.candidate,
        stats.entropy_nats,
        drawn.renoise,
        drawn.next_canvas,
        batch.slots,
        batch.lengths,
        batch.first_rows,
        block_ends,
        slots.numbers,
        slots.tokens,
        slots.canvas,
        slots.stop_tokens,
        settings.table,
        stages.confidence,
        stages.stability,
        *settled,
        n,
        C,
        slots.canvas.stride(0),
        max_model_len,
        stages.num_stages_at(n),
        EMITS_LAST=emits.last,
        EMITS_OTHERS=emits.others,
        KEEPS_EMITTED=keeps_emitted,
        PLACES=triton.next_power_of_2(C),
        TILE=min(16, triton.next_power_of_2(C)),
        num_warps=8,
    )
    return settled


def store_soft_embeds(
    soft_rows: torch.Tensor,  # [rows, H]
    settled: PlainSettled,
    batch: CanvasBatch,
    slots: CanvasSlots,  # whose `soft_embeds` are changed in place
) -> None:
    """Writes to the slots the expected embeddings that the next step's self-conditioning reads.
    They are zeros where another block starts. A cut canvas' stay. A program writes a position's."""
    hidden_size = soft_rows.shape[1]
    _store_soft_kernel[(batch.num_canvases, batch.canvas_length)](
        soft_rows,
        settled.flags,
        batch.slots,
        batch.lengths,
        batch.first_rows,
        slots.soft_embeds,
        batch.num_canvases,
        batch.canvas_length,
        hidden_size,
        soft_rows.stride(0),
        HIDDEN=triton.next_power_of_2(hidden_size),
    )


# Columns of the slots' tables.
_STEPS_DONE = tl.constexpr(SlotNumbers._fields.index("steps_done"))
_IS_COMMITTING = tl.constexpr(SlotNumbers._fields.index("is_committing"))
_TIMES_REPEATED = tl.constexpr(SlotNumbers._fields.index("times_repeated"))
_NUM_STEPS = tl.constexpr(SlotNumbers._fields.index("num_steps"))
_END = tl.constexpr(SlotNumbers._fields.index("end"))
_WIDTH = tl.constexpr(SlotNumbers._fields.index("width"))
_FITTED_END = tl.constexpr(SlotNumbers._fields.index("fitted_end"))
_NUMBERS = tl.constexpr(len(SlotNumbers._fields))
_ENTROPY_BOUND = tl.constexpr(Settings._fields.index("entropy_bound"))
_CONFIDENCE = tl.constexpr(Settings._fields.index("confidence_threshold"))
_STABILITY = tl.constexpr(Settings._fields.index("stability_threshold"))
_IS_GREEDY = tl.constexpr(Settings._fields.index("is_greedy"))
_ANSWER_ONLY = tl.constexpr(Settings._fields.index("judges_answer_only"))
_LOAD_STAGES = tl.constexpr(Settings._fields.index("load_stages"))
_SETTINGS = tl.constexpr(len(Settings._fields))
_MAX_STOPS = tl.constexpr(MAX_FORESEEN_STOPS)
_WIDTH_STEP = tl.constexpr(WIDTH_STEP)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_EVERY_BLOCK = tl.constexpr(EVERY_BLOCK)


@triton.jit
def _mean(nats, places):
    """The mean over those places, as in `rules.is_confident`."""
    count = tl.sum(places.to(tl.int32), 0).to(tl.float64)
    return tl.sum(tl.where(places, nats, 0.0).to(tl.float64), 0) / count


@triton.jit
def _accepted(
    own,  # [PLACES] fp32, entropies; infinite behind the canvas
    entropy,  # the same, in memory
    length,
    bound,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    """`accept_by_entropy_bound` without sorting: each place sums up those that come before it."""
    place = tl.arange(0, PLACES)
    up_to = tl.zeros((PLACES, TILE), dtype=tl.float64)
    for first in range(0, PLACES, TILE):
        other_place = first + tl.arange(0, TILE)
        other = tl.load(entropy + other_place, mask=other_place < length, other=float("inf"))
        is_tie = (other[None, :] == own[:, None]) & (other_place[None, :] <= place[:, None])
        comes_first = (other[None, :] < own[:, None]) | is_tie
        up_to += tl.where(comes_first, other.to(tl.float64)[None, :], 0.0)
    return (tl.sum(up_to, 1).to(tl.float32) - own <= bound) & (place < length)


@triton.jit
def _is_cut(numbers, length, end, max_model_len):
    """`CanvasStep._cut_canvases`."""
    room = max_model_len - (end - length)
    fitted = tl.load(numbers + _FITTED_END) - (end - length)
    fitted = tl.maximum(fitted + _WIDTH_STEP - 1, 0) // _WIDTH_STEP * _WIDTH_STEP
    width = tl.minimum(tl.load(numbers + _WIDTH), fitted)
    return length != tl.minimum(width, room)


@triton.jit(
    do_not_specialize=["num_canvases", "stage"],
    # Of which a program reads one number each, wherever the batch's begin.
    do_not_specialize_on_alignment=["slots", "lengths", "first_rows", "block_ends"],
)
def _settle_kernel(
    best_guess,  # [rows] int64
    candidate,
    entropy,  # [rows] fp32
    renoise,  # [n, C] int64
    next_canvas,
    slots,  # [n] int64
    lengths,
    first_rows,
    block_ends,
    numbers,  # [R, _NUMBERS] int64
    tokens,  # [R, 2, C] int64
    canvas,  # [R, C] int64
    stop_tokens,  # [R, _MAX_STOPS] int64
    settings,  # [R, _SETTINGS] fp32
    stage_confidence,  # [stages + 1] fp32
    stage_stability,
    told,  # [n * C + 2 * n] int32: best guesses, emitted, rejected
    flags,  # [3, n] bool
    counted,  # [len(NAMES), n] fp32
    num_canvases,
    canvas_length,
    canvas_stride,
    max_model_len,
    stage,
    EMITS_LAST: tl.constexpr,
    EMITS_OTHERS: tl.constexpr,
    KEEPS_EMITTED: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0)
    slot, length = tl.load(slots + i), tl.load(lengths + i)
    first_row = tl.load(first_rows + i)
    place = tl.arange(0, PLACES)
    is_place, valid = place < canvas_length, place < length
    numbers += slot * _NUMBERS
    settings += slot * _SETTINGS
    last_guess = tokens + slot * 2 * canvas_length + place
    drawn = i * canvas_length + place

    nats = tl.load(entropy + first_row + place, mask=valid, other=float("inf"))
    guess = tl.load(best_guess + first_row + place, mask=valid, other=0)
    kept = tl.load(candidate + first_row + place, mask=valid, other=0)
    kept = tl.where(tl.load(settings + _IS_GREEDY) > 0, guess, kept)
    earlier = tl.load(last_guess, mask=is_place, other=0)
    is_accepted = _accepted(
        nats, entropy + first_row, length, tl.load(settings + _ENTROPY_BOUND), PLACES, TILE
    )

    is_stop = place < 0
    for k in range(_MAX_STOPS):
        is_stop = is_stop | (guess == tl.load(stop_tokens + slot * _MAX_STOPS + k))
    first_stop = tl.min(tl.where(is_stop & valid, place, PLACES), 0)
    last_judged = tl.where(tl.load(settings + _ANSWER_ONLY) > 0, first_stop, PLACES)
    judged = valid & (place <= last_judged)

    is_new = (guess != earlier) & judged
    is_same = tl.max(is_new.to(tl.int32), 0) == 0
    repeated = tl.where(is_same, tl.load(numbers + _TIMES_REPEATED) + 1, 0)
    mean = tl.minimum(_mean(nats, judged), _mean(nats, valid))
    allowed = tl.minimum(tl.load(settings + _LOAD_STAGES).to(tl.int32), stage)
    confidence = tl.maximum(tl.load(settings + _CONFIDENCE), tl.load(stage_confidence + allowed))
    stability = tl.minimum(tl.load(settings + _STABILITY), tl.load(stage_stability + allowed))
    converged = (repeated.to(tl.float32) >= stability) & (mean.to(tl.float32) < confidence)
    step = tl.load(numbers + _STEPS_DONE) + 1
    found_finished = converged | (step >= tl.load(numbers + _NUM_STEPS))

    commits = tl.load(numbers + _IS_COMMITTING) == 1
    finished = found_finished & (commits == 0)
    request_end, block_end = tl.load(numbers + _END), tl.load(block_ends + i).to(tl.int64)
    is_last = (first_stop < PLACES) | (block_end >= request_end)
    is_emitted = request_end == _EVERY_BLOCK
    if EMITS_LAST:
        is_emitted = is_emitted | is_last
    if EMITS_OTHERS:
        is_emitted = is_emitted | (is_last == 0)
    at_once = finished & is_emitted
    ends = commits | at_once
    is_cut = _is_cut(numbers, length, block_end, max_model_len)
    is_taken = is_cut == 0

    following = tl.load(next_canvas + drawn, mask=is_place, other=0)
    noise = tl.load(renoise + drawn, mask=is_place, other=0)
    denoised = tl.where(finished, guess, tl.where(is_accepted, kept, noise))
    tl.debug_barrier()  # no warp may read the slot's numbers after another has written them
    tl.store(
        canvas + slot * canvas_stride + place,
        tl.where(ends, following, denoised),
        mask=is_place & is_taken,
    )
    tl.store(last_guess, tl.where(ends, _NO_TOKEN, guess), mask=is_place & is_taken)
    tl.store(numbers + _STEPS_DONE, tl.where(ends, 0, step), mask=is_taken)
    tl.store(numbers + _IS_COMMITTING, (finished & (at_once == 0)).to(tl.int64), mask=is_taken)
    tl.store(numbers + _TIMES_REPEATED, repeated, mask=is_taken)

    tl.store(told + drawn, tl.where(commits, earlier, guess).to(tl.int32), mask=is_place)
    tokens_emitted = tl.where(ends & is_taken, length, 0).to(tl.int32)
    emitted = told + num_canvases * canvas_length + i
    tl.store(emitted, tokens_emitted)
    kept = tokens_emitted if KEEPS_EMITTED else 0
    tl.store(emitted + num_canvases, length.to(tl.int32) - kept)
    tl.store(flags + i, ends & is_taken)
    tl.store(flags + num_canvases + i, at_once)
    tl.store(flags + 2 * num_canvases + i, is_cut)
    tl.store(counted + i, step.to(tl.float32))
    tl.store(counted + num_canvases + i, tl.sum(is_accepted.to(tl.float32), 0))
    tl.store(counted + 2 * num_canvases + i, tl.sum(tl.where(valid, nats, 0.0), 0))
    tl.store(counted + 3 * num_canvases + i, ((commits == 0) & is_taken).to(tl.float32))
    tl.store(counted + 4 * num_canvases + i, found_finished.to(tl.float32))
    tl.store(counted + 5 * num_canvases + i, converged.to(tl.float32))


@triton.jit(
    do_not_specialize=["num_canvases"],
    do_not_specialize_on_alignment=["flags", "slots", "lengths", "first_rows"],
)
def _store_soft_kernel(
    soft_rows,  # [rows, H]
    flags,  # [3, n] bool
    slots,  # [n] int64
    lengths,
    first_rows,
    soft_embeds,  # [R, C, H]
    num_canvases,
    canvas_length,
    hidden_size,
    row_stride,
    HIDDEN: tl.constexpr,
):
    i, place = tl.program_id(0), tl.program_id(1)
    if tl.load(flags + 2 * num_canvases + i) == 0:
        column = tl.arange(0, HIDDEN)
        is_column = column < hidden_size
        is_read = (place < tl.load(lengths + i)) & (tl.load(flags + i) == 0)
        row = tl.load(first_rows + i) + place
        soft = tl.load(soft_rows + row * row_stride + column, mask=is_column & is_read, other=0.0)
        cell = tl.load(slots + i) * canvas_length + place
        tl.store(soft_embeds + cell * hidden_size + column, soft, mask=is_column)
