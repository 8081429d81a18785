"""A mixture of experts in Triton, for steps in which an expert has some 4 to 1,000 rows.

Few rows are as fast as weights are read. A product of Hopper's has 64 rows and at least 8 columns
(`wgmma`), so here output channels are its rows and tokens its columns: FP8 needs no tile of 64
tokens, and no detour by fp16. A program reads the weights of some channels of one expert in full
lines, several loads ahead, for a block of the expert's rows. A block need not be a power of two: it
is multiplied in two parts, so that nearly all experts fit one. Launches:

- gate and up, and the activation;
- in FP8, quantisation, for which a row needs all its channels;
- down;
- the sum over a token's experts, in their order. It needs all experts; atomic additions would do it
  in the launch before, but in another order each time.

Legend: T tokens, E experts, K hidden channels, N channels between gate and down.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_dllm.experts.definition import ACTIVATIONS, Assignment, Experts
from vllm_dllm.experts.quantise_triton import quantise_rows

SIZES = (16, 32, 64, 80, 128, 144)  # of a block of rows
_SUMMED = 1024  # channels that a program of the last launch computes
_FULL = 1.3  # standard deviations above the mean: nine of ten experts have fewer rows


class Tile(NamedTuple):
    """What a program of a product computes, and how."""

    channels: int  # that it computes; for gate and up, of each
    depth_bytes: int  # how much of a row of weights a pass of the loop multiplies
    stages: int  # loads of weights in shared memory, one of which is multiplied
    num_warps: int


class Tiles(NamedTuple):
    """The tiles of both products. A layer's N is a multiple of `gate_up.channels`, its K of
    `gate_up.depth_bytes`."""

    gate_up: Tile
    down: Tile


def choose_tiles(size: int) -> Tiles:
    """Returns the tiles for blocks of `size` rows, the fastest of those that were timed on an H200
    in FP8. All leave room for two or three programs on a processor."""
    gate_up = Tile(64, 128, 4 if size == 80 else 3, 4)
    return Tiles(gate_up, Tile(128, 128, 3, 4) if size < 128 else Tile(128, 64, 4, 4))


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


def block_size(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Returns the size of blocks, in rows, with which most experts have one block if tokens choose
    experts at random. An expert with more blocks has its weights read again. Where all need
    several, 128."""
    mean = num_tokens * top_k / num_experts
    return next((size for size in SIZES if mean + _FULL * mean**0.5 <= size), 128)


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
    num_blocks = len(assignment.experts)
    main = 1 << size.bit_length() - 1  # the largest power of two
    shape = {"K": hidden, "N": width, "MAIN": main, "REST": size - main}
    weight_bytes = experts.down.element_size()
    _gate_up_kernel[width // gate_up.channels, num_blocks](
        states, state_scale, experts.gate_up, experts.gate_up_scale, *assignment, inner, num_rows,
        **shape, **_launch_options(gate_up, weight_bytes), TOP_K=top_k,
        IS_GELU=activation == "gelu_tanh",
    )  # fmt: skip
    between, scale = inner, None
    if experts.down_scale is not None:
        between, scale = quantise_rows(inner)
    _down_kernel[triton.cdiv(hidden, down.channels), num_blocks](
        between, scale, experts.down, experts.down_scale, *assignment, rows, num_rows,
        **shape, **_launch_options(down, weight_bytes),
    )  # fmt: skip
    _sum_kernel[len(states), triton.cdiv(hidden, _SUMMED)](
        rows, weights, output, K=hidden, TOP_K=top_k, BLOCK=_SUMMED
    )


def _launch_options(tile: Tile, weight_bytes: int) -> dict[str, int]:
    """Returns what both products' kernels take of a tile, by Triton's names."""
    return {
        "CHANNELS": tile.channels,
        "DEPTH": tile.depth_bytes // weight_bytes,
        "STAGES": tile.stages,
        "num_warps": tile.num_warps,
    }


@triton.jit
def _read_rows(rows, num_rows, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Returns SIZE of a block's rows, behind its first FIRST, and which of them are no padding.
    `rows`: of the block."""
    row = tl.load(rows + FIRST + tl.arange(0, SIZE))
    return row, row < num_rows


@triton.jit
def _read_scales(scales, index, is_read, SIZE: tl.constexpr):
    """Returns the scales [SIZE] of rows or channels; 1 unless FP8."""
    if scales is None:
        return tl.full((SIZE,), 1.0, tl.float32)
    else:
        return tl.load(scales + index, mask=is_read, other=0.0)


@triton.jit
def _write_activated(
    product,  # [2 * CHANNELS, SIZE] fp32: 8 channels of gate, the same 8 of up, and so on
    gate_scale,  # [CHANNELS]
    up_scale,
    scale,  # [SIZE]
    output,
    row,
    is_row,
    channel,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """A thread of Hopper's products has the channels of gate and of up that belong together, so
    they need not change places."""
    apart = tl.permute(tl.reshape(product, (CHANNELS // 8, 2, 8, SIZE)), (0, 2, 3, 1))
    gate, up = tl.split(apart)
    gate = tl.reshape(gate, (CHANNELS, SIZE)) * (gate_scale[:, None] * scale[None, :])
    up = tl.reshape(up, (CHANNELS, SIZE)) * (up_scale[:, None] * scale[None, :])
    opening = gate
    if IS_GELU:  # x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y), here y = sqrt(2 / pi) * ...
        opening = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = tl.trans((gate * tl.sigmoid(opening) * up).to(output.dtype.element_ty))
    address = output + row.to(tl.int64)[:, None] * N + channel[None, :]
    tl.store(address, value, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    states,  # [T, K]
    state_scale,  # [T] fp32; None, as the other scales, unless FP8
    weight,  # [E, 2 * N, K]
    weight_scale,  # [E, 2 * N] fp32
    block_rows,  # [blocks * (MAIN + REST)] int32
    block_experts,  # [blocks] int32
    num_sorted,  # [1] int32
    inner,  # [T * TOP_K, N]
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    # Programs of one block are neighbours, so that all but the first find its rows in the cache.
    part, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    rows = block_rows + block * (MAIN + REST)
    row, is_row = _read_rows(rows, num_rows, 0, MAIN)
    if REST:
        last, is_last = _read_rows(rows, num_rows, MAIN, REST)
    if block * (MAIN + REST) >= tl.load(num_sorted):
        return
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < N
    gate_scale = _read_scales(weight_scale, expert * (2 * N) + channel, is_channel, CHANNELS)
    up_scale = _read_scales(weight_scale, expert * (2 * N) + N + channel, is_channel, CHANNELS)
    both = tl.arange(0, 2 * CHANNELS)
    of_both = part * CHANNELS + both // 16 * 8 + both % 8 + both // 8 % 2 * N
    depth = tl.arange(0, DEPTH)
    of_expert = weight + expert * (2 * N * K)
    of_weight = of_both[:, None] * K + depth[None, :]
    of_row = (row // TOP_K)[:, None] * K + depth[None, :]
    scale = _read_scales(state_scale, row // TOP_K, is_row, MAIN)
    product = tl.zeros((2 * CHANNELS, MAIN), dtype=tl.float32)
    if REST:
        of_last = (last // TOP_K)[:, None] * K + depth[None, :]
        last_scale = _read_scales(state_scale, last // TOP_K, is_last, REST)
        last_product = tl.zeros((2 * CHANNELS, REST), dtype=tl.float32)
    for first in tl.range(0, K, DEPTH, num_stages=STAGES):
        read = tl.load(of_expert + first + of_weight)
        # Padding is not read: if many programs read one row, they wait for each other.
        state = tl.load(states + first + of_row, mask=is_row[:, None], other=0.0)
        product = tl.dot(read, tl.trans(state), product, input_precision="ieee")
        if REST:
            state = tl.load(states + first + of_last, mask=is_last[:, None], other=0.0)
            last_product = tl.dot(read, tl.trans(state), last_product, input_precision="ieee")
    _write_activated(
        product, gate_scale, up_scale, scale, inner, row, is_row, channel,
        N, CHANNELS, MAIN, IS_GELU,
    )  # fmt: skip
    if REST:
        _write_activated(
            last_product, gate_scale, up_scale, last_scale, inner, last, is_last, channel,
            N, CHANNELS, REST, IS_GELU,
        )  # fmt: skip


@triton.jit
def _write_rows(product, channel_scale, scale, output, row, channel, mask, K: tl.constexpr):
    """Writes `product` [CHANNELS, SIZE] to rows where `mask` [SIZE, CHANNELS] says so."""
    product *= channel_scale[:, None] * scale[None, :]
    address = output + row.to(tl.int64)[:, None] * K + channel[None, :]
    tl.store(address, tl.trans(product.to(output.dtype.element_ty)), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    inner,  # [T * top_k, N]
    inner_scale,  # [T * top_k] fp32
    weight,  # [E, K, N]
    weight_scale,  # [E, K] fp32
    block_rows,  # as above, as are the next two
    block_experts,
    num_sorted,
    output,  # [T * top_k, K]
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    part, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    rows = block_rows + block * (MAIN + REST)
    row, is_row = _read_rows(rows, num_rows, 0, MAIN)
    if REST:
        last, is_last = _read_rows(rows, num_rows, MAIN, REST)
    if block * (MAIN + REST) >= tl.load(num_sorted):
        return
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < K
    channel_scale = _read_scales(weight_scale, expert * K + channel, is_channel, CHANNELS)
    depth = tl.arange(0, DEPTH)
    of_expert = weight + expert * (K * N)
    of_weight = channel[:, None] * N + depth[None, :]
    of_row = row[:, None] * N + depth[None, :]
    scale = _read_scales(inner_scale, row, is_row, MAIN)
    product = tl.zeros((CHANNELS, MAIN), dtype=tl.float32)
    if REST:
        of_last = last[:, None] * N + depth[None, :]
        last_scale = _read_scales(inner_scale, last, is_last, REST)
        last_product = tl.zeros((CHANNELS, REST), dtype=tl.float32)
    for first in tl.range(0, N, DEPTH, num_stages=STAGES):
        is_depth = (first + depth < N)[None, :]
        if K % CHANNELS or N % DEPTH:
            is_read = is_channel[:, None] & is_depth
            read = tl.load(of_expert + first + of_weight, mask=is_read, other=0.0)
        else:
            read = tl.load(of_expert + first + of_weight)
        value = tl.load(inner + first + of_row, mask=is_row[:, None] & is_depth, other=0.0)
        product = tl.dot(read, tl.trans(value), product, input_precision="ieee")
        if REST:
            value = tl.load(inner + first + of_last, mask=is_last[:, None] & is_depth, other=0.0)
            last_product = tl.dot(read, tl.trans(value), last_product, input_precision="ieee")
    mask = is_row[:, None] & is_channel[None, :]
    _write_rows(product, channel_scale, scale, output, row, channel, mask, K)
    if REST:
        mask = is_last[:, None] & is_channel[None, :]
        _write_rows(last_product, channel_scale, last_scale, output, last, channel, mask, K)


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
