"""A mixture of experts in Triton, for steps in which an expert has some 4 to 128 rows.

Such a step is as fast as its weights are read. A product of Hopper's has 64 rows and at least 8
columns (`wgmma`), so here output channels are its rows and tokens its columns: FP8 needs no tile of
64 tokens, and no detour by fp16. A program reads the weights of some channels of one expert once
and in full lines, several loads ahead, for a block of the expert's tokens. Three launches:

- gate and up, the activation, and for each row the largest element of the program's channels;
- down, which in FP8 quantises what it reads: a row's scale needs all its channels, so the first
  launch cannot, and the largest of 11 numbers costs less than a launch or a wait for all programs;
- the sum over a token's experts, in their order. It needs all experts; atomic additions would do it
  in the second launch, but in another order each time.

Legend: T tokens, E experts, K hidden channels, N channels between gate and down.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dllm.experts.activation_triton import activated
from vllm_dllm.experts.definition import ACTIVATIONS, MOST, SMALLEST_SCALE, Assignment, Experts

SIZES = (16, 32, 64, 128)  # of a block of rows
_SUMMED = 1024  # channels that a program of the last launch computes
_MOST, _SMALLEST_SCALE = tl.constexpr(MOST), tl.constexpr(SMALLEST_SCALE)


class Tile(NamedTuple):
    """What a program of a product computes, and how."""

    channels: int  # that it computes
    depth_bytes: int  # how much of a row of weights a pass of the loop multiplies
    stages: int  # loads of weights in shared memory, one of which is multiplied
    num_warps: int


class Tiles(NamedTuple):
    """The tiles of both products. A layer's N is a multiple of `gate_up.channels`, its K of
    `gate_up.depth_bytes`."""

    gate_up: Tile
    down: Tile


def choose_tiles(size: int) -> Tiles:
    """Returns the tiles for blocks of `size` rows: with as few warps as can hold the results
    without spilling, and three stages, so that three programs share a processor."""
    num_warps = 8 if size >= 64 else 4
    return Tiles(Tile(64, 128, 3, num_warps), Tile(128, 128, 3, num_warps))


def find_obstacle(hidden: int, width: int, activation: str) -> str | None:
    """Returns why a layer with K = `hidden` and N = `width` cannot run here. Returns None if it
    can."""
    if activation not in ACTIVATIONS:
        return f"expected the activation {' or '.join(ACTIVATIONS)}, got {activation}"
    tile = choose_tiles(SIZES[0]).gate_up
    if width % tile.channels or hidden % tile.depth_bytes:
        return (
            f"expected multiples of {tile.depth_bytes} hidden channels and of {tile.channels} "
            f"between, got {hidden} and {width}"
        )
    return None


def block_size(num_tokens: int, top_k: int, num_experts: int) -> int | None:
    """Returns the size of blocks, in rows, with which nearly every expert has one block if tokens
    choose experts at random. An expert with more blocks has its weights read again. Returns None if
    experts have more rows on average than the largest block."""
    mean = num_tokens * top_k / num_experts
    if mean > SIZES[-1]:
        return None
    return next((size for size in SIZES if mean + 2 * mean**0.5 <= size), SIZES[-1])


def mix_experts(
    states: torch.Tensor,  # [T, K] the model's type, or e4m3 with its scales
    state_scale: torch.Tensor | None,  # [T, 1] fp32
    experts: Experts,
    weights: torch.Tensor,  # [T, top_k] fp32
    assignment: Assignment,  # in blocks of `size`
    size: int,
    activation: str,
    inner: torch.Tensor,  # [T * top_k, N] the model's type; overwritten
    rows: torch.Tensor,  # [T * top_k, K] the same
    output: torch.Tensor,  # [T, K] the same; may share memory with `inner`
    tiles: Tiles | None = None,  # None: those of `choose_tiles`
) -> None:
    """Writes the result of `definition.mix_experts` to `output`, and overwrites `inner` and `rows`.
    All tensors are contiguous and on one device. Grids depend on shapes alone, so that a CUDA graph
    can capture the launches.

    Raises ValueError if `find_obstacle` finds one.
    """
    hidden, width = experts.down.shape[1:]
    if reason := find_obstacle(hidden, width, activation):
        raise ValueError(reason)
    gate_up, down = tiles or choose_tiles(size)
    num_rows, top_k = weights.numel(), weights.shape[1]
    num_blocks, parts = len(assignment.experts), width // gate_up.channels
    maxima = torch.empty(num_rows, parts, dtype=torch.float32, device=states.device)
    shape = {"K": hidden, "N": width, "TOKENS": size, "IS_FP8": experts.down_scale is not None}
    weight_bytes = experts.down.element_size()
    _gate_up_kernel[num_blocks, parts](
        states, state_scale, experts.gate_up, experts.gate_up_scale, *assignment, inner, maxima,
        num_rows, **shape, **_launch_options(gate_up, weight_bytes), TOP_K=top_k,
        IS_GELU=activation == "gelu_tanh",
    )  # fmt: skip
    _down_kernel[num_blocks, triton.cdiv(hidden, down.channels)](
        inner, maxima, experts.down, experts.down_scale, *assignment, rows,
        num_rows, **shape, **_launch_options(down, weight_bytes), PARTS=parts,
    )  # fmt: skip
    _sum_kernel[len(states), triton.cdiv(hidden, _SUMMED)](
        rows, weights, output, K=hidden, TOP_K=top_k, BLOCK=_SUMMED
    )


def _launch_options(tile: Tile, weight_bytes: int) -> dict[str, int]:
    """Returns what both products' kernels take of a tile, by Triton's names."""
    return {
        "CHANNELS": tile.channels,
        "DEPTH": tile.depth_bytes // weight_bytes,
        "num_stages": tile.stages,
        "num_warps": tile.num_warps,
    }


@triton.jit
def _rows_of_block(block, rows, num_rows, TOKENS: tl.constexpr):
    """The block's rows, [TOKENS], and which of them are no padding."""
    row = tl.load(rows + block * TOKENS + tl.arange(0, TOKENS))
    return row.to(tl.int64), row < num_rows


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    states,  # [T, K]
    state_scale,  # [T] fp32; None, as the other scales, unless IS_FP8
    weight,  # [E, 2 * N, K]
    weight_scale,  # [E, 2 * N] fp32
    block_rows,  # [blocks * TOKENS] int32
    block_experts,  # [blocks] int32
    num_sorted,  # [1] int32
    inner,  # [T * TOP_K, N]
    maxima,  # [T * TOP_K, N / CHANNELS] fp32; unused unless IS_FP8
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    # Blocks of one expert are neighbours, so that all but the first find its weights in the cache.
    block, part = tl.program_id(0), tl.program_id(1)
    if block * TOKENS >= tl.load(num_sorted):
        return
    expert = tl.load(block_experts + block).to(tl.int64)
    row, is_row = _rows_of_block(block, block_rows, num_rows, TOKENS)
    token = row // TOP_K
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    depth = tl.arange(0, DEPTH)
    of_gate = weight + (expert * 2 * N + channel[:, None]) * K + depth[None, :]
    of_state = states + token[:, None] * K + depth[None, :]
    gate = tl.zeros((CHANNELS, TOKENS), dtype=tl.float32)
    up = tl.zeros((CHANNELS, TOKENS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        state = tl.trans(tl.load(of_state + first, mask=is_row[:, None], other=0.0))
        gate = tl.dot(tl.load(of_gate + first), state, gate, input_precision="ieee")
        up = tl.dot(tl.load(of_gate + N * K + first), state, up, input_precision="ieee")
    if IS_FP8:
        scale = tl.load(state_scale + token, mask=is_row, other=0.0)[None, :]
        of_scale = weight_scale + expert * 2 * N + channel
        gate *= tl.load(of_scale)[:, None] * scale
        up *= tl.load(of_scale + N)[:, None] * scale
    value = activated(gate, up, IS_GELU).to(inner.dtype.element_ty)
    if IS_FP8:
        largest = tl.max(tl.abs(value.to(tl.float32)), 0)
        tl.store(maxima + row * (N // CHANNELS) + part, largest, mask=is_row)
    tl.store(inner + row[:, None] * N + channel[None, :], tl.trans(value), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    inner,  # [T * top_k, N]
    maxima,  # [T * top_k, PARTS] fp32
    weight,  # [E, K, N]
    weight_scale,  # [E, K] fp32
    block_rows,  # as above, as are the next two
    block_experts,
    num_sorted,
    output,  # [T * top_k, K]
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    block = tl.program_id(0)
    if block * TOKENS >= tl.load(num_sorted):
        return
    expert = tl.load(block_experts + block).to(tl.int64)
    row, is_row = _rows_of_block(block, block_rows, num_rows, TOKENS)
    if IS_FP8:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        is_part = (part < PARTS)[:, None] & is_row[None, :]
        of_part = maxima + part[:, None] + row[None, :] * PARTS
        # The largest by columns: by rows, Triton would give `value` below this tile's layout, and
        # would write it to shared memory byte by byte.
        largest = tl.max(tl.load(of_part, mask=is_part, other=0.0), 0)
        scale = tl.maximum(largest / _MOST, _SMALLEST_SCALE)
        inverse = 1 / scale
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < K
    depth = tl.arange(0, DEPTH)
    of_weight = weight + (expert * K + channel[:, None]) * N + depth[None, :]
    of_inner = inner + row[:, None] * N + depth[None, :]
    found = tl.zeros((CHANNELS, TOKENS), dtype=tl.float32)
    for first in range(0, N, DEPTH):
        is_depth = (first + depth < N)[None, :]
        value = tl.load(of_inner + first, mask=is_row[:, None] & is_depth, other=0.0)
        if IS_FP8:  # none is beyond the largest number, as none is beyond the row's own
            value = (value.to(tl.float32) * inverse[:, None]).to(weight.dtype.element_ty)
        read = tl.load(of_weight + first, mask=is_channel[:, None] & is_depth, other=0.0)
        found = tl.dot(read, tl.trans(value), found, input_precision="ieee")
    if IS_FP8:
        of_scale = weight_scale + expert * K + channel
        found *= tl.load(of_scale, mask=is_channel, other=0.0)[:, None] * scale[None, :]
    written = tl.trans(found.to(output.dtype.element_ty))
    mask = is_row[:, None] & is_channel[None, :]
    tl.store(output + row[:, None] * K + channel[None, :], written, mask=mask)


@triton.jit
def _sum_kernel(
    rows,  # [T * TOP_K, K]
    weights,  # [T, TOP_K] fp32
    output,  # [T, K]
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < K
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        value = tl.load(rows + row * K + channel, mask=is_channel, other=0.0)
        total += tl.load(weights + row) * value.to(tl.float32)
    tl.store(output + token * K + channel, total.to(output.dtype.element_ty), mask=is_channel)
