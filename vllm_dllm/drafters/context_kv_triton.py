"""`context_kv.store_context_kv_` for GPUs: one launch for few tokens, else a norm, a GEMM and one.

A program makes one key or value head of one layer for a tile of tokens, so that the head's norm and
rotation happen in registers and its cache entries are written from there. A head's columns are kept
as two halves, the first and second member of each rotating pair: pair i is (i, i + R / 2) or
(2 i, 2 i + 1), and the dimensions that do not rotate fill up the pairs, with the angle 0.

Up to `_FUSED_ROWS` tokens (one tile), any kernel reads the weights only once, so the projection is
part of this one. The norm of the states is then a factor of the row, applied after the projection.
With more tokens, cuBLAS multiplies, and the kernel takes the result. (The threshold is an estimate:
a kernel with one head per program reads the weights again for every tile of tokens.)

Arguments that belong together are a named tuple, which Triton unpacks at launch.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.support import FIRST_FP8_CAPABILITY, shared_bytes
from vllm_dllm.drafters.context import FP8, LARGEST_FP8, ContextWeights, DrafterCaches

_FUSED_ROWS = 64
_ROWS = 16  # of the kernel without a projection
_SPARE_BYTES = 4096  # of shared memory, for what Triton adds
_LARGEST_FP8 = tl.constexpr(LARGEST_FP8)


class Tokens(NamedTuple):
    positions: Any  # [T] int64
    slots: Any  # [L, T] int64
    slots_stride: Any


class Head(NamedTuple):
    """What turns a projection into a key or a value."""

    k_norm: Any  # [L, D]
    cos_sin: Any  # [max_position, R]
    cos_sin_stride: Any
    eps: Any
    value_factor: Any
    NUM_HEADS: Any  # constants, like the following
    SIZE: Any
    ROTATING: Any
    HALF: Any  # pairs, rounded up to a power of two
    IS_NEOX: Any


class Caches(NamedTuple):
    like: Any  # one of them, for its type
    addresses: Any  # [L, 2] int64
    scales: Any  # [L, 2] fp32
    block_size: Any
    block_stride: Any
    slot_stride: Any
    head_stride: Any


def store_context_kv_(
    states: Tensor,
    positions: Tensor,
    slots: Tensor,  # [L, T] int64
    weights: ContextWeights,
    caches: DrafterCaches,
) -> None:
    """See `context_kv.store_context_kv_`.

    Raises:
        ValueError: for fp8 caches on a GPU without fp8.
    """
    if caches.keys[0].dtype == FP8 and states.is_cuda:
        capability = torch.cuda.get_device_capability(states.device)
        if capability < FIRST_FP8_CAPABILITY:
            raise ValueError(
                "an fp8 cache needs a GPU of compute capability {}.{} or higher, got {}.{}: serve "
                "the drafter with another kv_cache_dtype".format(*FIRST_FP8_CAPABILITY, *capability)
            )
    # Before its norm, a state times its weight may overflow fp16.
    if len(states) <= _FUSED_ROWS and states.dtype != torch.float16:
        _project_and_store(states, positions, slots, weights, caches)
    else:
        normed = F.rms_norm(states, states.shape[-1:], weights.hidden_norm, weights.eps)
        projected = F.linear(normed, weights.projection, weights.bias)
        _store_projected(projected, positions, slots, weights, caches)


def fused_tiles(
    num_tokens: int, head_size: int, element_size: int, shared_memory: int
) -> dict[str, int]:
    """Tiles of the kernel that projects, with as many stages as fit, so that the weights stream."""
    rows, inputs = max(16, triton.next_power_of_2(num_tokens)), 256 // element_size
    stage_bytes = 256 * (rows + triton.next_power_of_2(head_size))
    num_stages = min(5, max(2, (shared_memory - _SPARE_BYTES) // stage_bytes))
    return {"ROWS": rows, "INPUTS": inputs, "num_warps": 4, "num_stages": num_stages}


def _project_and_store(
    states: Tensor,
    positions: Tensor,
    slots: Tensor,
    weights: ContextWeights,
    caches: DrafterCaches,
) -> None:
    shared_memory = 0
    if states.is_cuda:
        shared_memory = shared_bytes(torch.cuda.get_device_capability(states.device))
    tiles = fused_tiles(len(states), weights.head_size, states.element_size(), shared_memory)
    grid = (triton.cdiv(len(states), tiles["ROWS"]), 2 * weights.num_layers * weights.num_kv_heads)
    _project_and_store_kernel[grid](
        states,
        weights.hidden_norm,
        weights.projection,
        weights.projection if weights.bias is None else weights.bias,
        states.stride(0),
        weights.projection.stride(0),
        len(states),
        Tokens(positions, slots, slots.stride(0)),
        _head(weights),
        _caches(caches),
        HIDDEN_SIZE=states.shape[1],
        HAS_BIAS=weights.bias is not None,
        **tiles,
    )


def _store_projected(
    projected: Tensor,  # [T, L * 2 * N * D]
    positions: Tensor,
    slots: Tensor,
    weights: ContextWeights,
    caches: DrafterCaches,
) -> None:
    num_tokens = len(projected)
    grid = (triton.cdiv(num_tokens, _ROWS), 2 * weights.num_layers * weights.num_kv_heads)
    _store_projected_kernel[grid](
        projected,
        projected.stride(0),
        num_tokens,
        Tokens(positions, slots, slots.stride(0)),
        _head(weights),
        _caches(caches),
        ROWS=_ROWS,
    )


def _head(weights: ContextWeights) -> Head:
    constants = (
        weights.num_kv_heads,
        weights.head_size,
        weights.cos_sin.shape[1],
        max(16, triton.next_power_of_2(weights.head_size // 2)),
        weights.is_neox,
    )
    return Head(
        weights.k_norm,
        weights.cos_sin,
        weights.cos_sin.stride(0),
        weights.eps,
        weights.value_factor,
        *map(tl.constexpr, constants),
    )


def _caches(caches: DrafterCaches) -> Caches:
    like = caches.keys[0]
    return Caches(like, caches.addresses, caches.scales, like.shape[1], *like.stride()[:3])


@triton.jit
def _pairs(heads):
    """Dimensions of each pair's first and second member, and which pairs there are."""
    pair = tl.arange(0, heads.HALF)
    first, second = 2 * pair, 2 * pair + 1
    if heads.IS_NEOX:
        turning = heads.ROTATING // 2
        first = tl.where(pair < turning, pair, pair + turning)
        second = tl.where(pair < turning, pair + turning, pair + heads.SIZE // 2)
    return pair, first, second, pair < heads.SIZE // 2


@triton.jit
def _store(
    first,  # [ROWS, HALF] fp32, projections of the first member of each pair
    second,
    row,
    slot,  # [ROWS] int64
    head,  # of all layers' keys and values
    tokens,
    heads,
    caches,
    element_type: tl.constexpr,  # of the states
):
    """Norms and rotates a key head, or scales a value head, and writes it."""
    layer, is_value = head // (2 * heads.NUM_HEADS), head // heads.NUM_HEADS % 2
    pair, first_dim, second_dim, is_pair = _pairs(heads)
    first = first.to(element_type).to(tl.float32)
    second = second.to(element_type).to(tl.float32)
    if is_value != 0:
        first *= heads.value_factor
        second *= heads.value_factor
    else:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / heads.SIZE
        factor = tl.rsqrt(mean + heads.eps)[:, None]
        norm = heads.k_norm + layer * heads.SIZE
        first_norm = tl.load(norm + first_dim, mask=is_pair, other=0.0).to(tl.float32)
        second_norm = tl.load(norm + second_dim, mask=is_pair, other=0.0).to(tl.float32)
        first = first * factor * first_norm[None, :]
        second = second * factor * second_norm[None, :]
        # Rows without a slot need not have a position either.
        position = tl.load(tokens.positions + row, mask=slot >= 0, other=0).to(tl.int64)
        angles = heads.cos_sin + position[:, None] * heads.cos_sin_stride + pair[None, :]
        turns = (slot >= 0)[:, None] & (pair < heads.ROTATING // 2)[None, :]
        cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(angles + heads.ROTATING // 2, mask=turns, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    first = first.to(element_type).to(tl.float32)
    second = second.to(element_type).to(tl.float32)
    cache_type = caches.like.dtype.element_ty
    if cache_type == tl.float8e4nv:
        scale = tl.load(caches.scales + layer * 2 + is_value)
        first = tl.clamp(first / scale, -_LARGEST_FP8, _LARGEST_FP8)
        second = tl.clamp(second / scale, -_LARGEST_FP8, _LARGEST_FP8)
    address = tl.load(caches.addresses + layer * 2 + is_value)
    cache = tl.multiple_of(address.to(tl.pointer_type(cache_type)), 16)
    place = slot // caches.block_size * caches.block_stride
    place += slot % caches.block_size * caches.slot_stride
    place += (head % heads.NUM_HEADS).to(tl.int64) * caches.head_stride
    written = (slot >= 0)[:, None] & is_pair[None, :]
    entry = cache + place[:, None]
    tl.store(entry + first_dim[None, :], first.to(cache_type), mask=written)
    tl.store(entry + second_dim[None, :], second.to(cache_type), mask=written)


@triton.jit(do_not_specialize=["num_tokens"])
def _project_and_store_kernel(
    states,  # [T, H]
    hidden_norm,  # [H]
    projection,  # [L * 2 * N * D, H]
    bias,  # [L * 2 * N * D] if HAS_BIAS
    states_stride,
    projection_stride,
    num_tokens,
    tokens,
    heads,
    caches,
    HIDDEN_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    head = tl.program_id(1)  # of all layers' keys and values
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tokens.slots + head // (2 * heads.NUM_HEADS) * tokens.slots_stride
    slot = tl.load(slots + row, mask=row < num_tokens, other=-1)
    if tl.max(slot, 0) < 0:  # padding of a captured graph, or rejected drafts
        return
    _, first_dim, second_dim, is_pair = _pairs(heads)
    rows_of_head = head.to(tl.int64) * heads.SIZE
    first_rows = projection + (rows_of_head + first_dim)[None, :] * projection_stride
    second_rows = projection + (rows_of_head + second_dim)[None, :] * projection_stride
    token = states + row[:, None].to(tl.int64) * states_stride
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    first = tl.zeros((ROWS, heads.HALF), dtype=tl.float32)
    second = tl.zeros((ROWS, heads.HALF), dtype=tl.float32)
    for start in range(0, HIDDEN_SIZE, INPUTS):
        column = start + tl.arange(0, INPUTS)
        is_column = column < HIDDEN_SIZE
        state = tl.load(
            token + column[None, :], mask=(slot >= 0)[:, None] & is_column[None, :], other=0.0
        ).to(tl.float32)
        squares += tl.sum(state * state, 1)
        norm = tl.load(hidden_norm + column, mask=is_column, other=0.0).to(tl.float32)
        scaled = (state * norm[None, :]).to(states.dtype.element_ty)
        used = is_column[:, None] & is_pair[None, :]
        weight = tl.load(first_rows + column[:, None], mask=used, other=0.0)
        first = tl.dot(scaled, weight, first, input_precision="ieee")
        weight = tl.load(second_rows + column[:, None], mask=used, other=0.0)
        second = tl.dot(scaled, weight, second, input_precision="ieee")
    factor = tl.rsqrt(squares / HIDDEN_SIZE + heads.eps)[:, None]
    first *= factor
    second *= factor
    if HAS_BIAS:
        of_head = bias + rows_of_head
        first += tl.load(of_head + first_dim, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        second += tl.load(of_head + second_dim, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    _store(first, second, row, slot, head, tokens, heads, caches, states.dtype.element_ty)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_projected_kernel(
    projected,  # [T, L * 2 * N * D]
    projected_stride,
    num_tokens,
    tokens,
    heads,
    caches,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tokens.slots + head // (2 * heads.NUM_HEADS) * tokens.slots_stride
    slot = tl.load(slots + row, mask=row < num_tokens, other=-1)
    if tl.max(slot, 0) < 0:
        return
    _, first_dim, second_dim, is_pair = _pairs(heads)
    used = (slot >= 0)[:, None] & is_pair[None, :]
    token = projected + row[:, None].to(tl.int64) * projected_stride + head * heads.SIZE
    first = tl.load(token + first_dim[None, :], mask=used, other=0.0)
    second = tl.load(token + second_dim[None, :], mask=used, other=0.0)
    _store(first, second, row, slot, head, tokens, heads, caches, projected.dtype.element_ty)
