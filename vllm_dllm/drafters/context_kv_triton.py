"""`context_kv.store_context_kv_` for GPUs: one launch, or for many tokens a norm, a GEMM and one.

A program makes one key or value head of one layer for a tile of tokens, so that the head's norm and
rotation follow in registers and its cache entries are written from there. A head's columns are kept
as two halves, the first and second member of each rotating pair: pair i is (i, i + R / 2) or
(2 i, 2 i + 1), and the dimensions that do not rotate fill up the pairs, with the angle 0.

Up to `_FUSED_ROWS` tokens, one tile, the weights are read once whatever multiplies them, and the
projection is part of the kernel. The norm of the states then is a factor of the row, applied after
it. Beyond, cuBLAS multiplies, and the kernel takes what it made. (Where the one overtakes the other
is an estimate: a kernel that keeps to heads reads the weights again for every tile of tokens.)
"""

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
                "an fp8 cache takes a GPU of compute capability {}.{} and up, got {}.{}: serve "
                "the drafter with another kv_cache_dtype".format(*FIRST_FP8_CAPABILITY, *capability)
            )
    # Before its norm, a state times its weight may be more than fp16 holds.
    if len(states) <= _FUSED_ROWS and states.dtype != torch.float16:
        _project_and_store(states, positions, slots, weights, caches)
    else:
        normed = F.rms_norm(states, states.shape[-1:], weights.hidden_norm, weights.eps)
        projected = F.linear(normed, weights.projection, weights.bias)
        _store_projected(projected, positions, slots, weights, caches)


def fused_tiles(
    num_tokens: int, head_size: int, element_size: int, shared_memory: int
) -> dict[str, int]:
    """Of the kernel that projects; as many stages as fit, so that the weights stream."""
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
        *_common(len(states), positions, slots, weights, caches),
        HIDDEN_SIZE=states.shape[1],
        HAS_BIAS=weights.bias is not None,
        **_constants(weights),
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
        *_common(num_tokens, positions, slots, weights, caches),
        ROWS=_ROWS,
        **_constants(weights),
    )


def _common(
    num_tokens: int,
    positions: Tensor,
    slots: Tensor,
    weights: ContextWeights,
    caches: DrafterCaches,
) -> tuple[object, ...]:
    first = caches.keys[0]
    return (
        num_tokens,
        positions,
        slots,
        slots.stride(0),
        weights.k_norm,
        weights.cos_sin,
        weights.cos_sin.stride(0),
        weights.eps,
        weights.value_factor,
        first,
        caches.addresses,
        caches.scales,
        first.shape[1],
        *first.stride()[:3],
    )


def _constants(weights: ContextWeights) -> dict[str, object]:
    return {
        "NUM_HEADS": weights.num_kv_heads,
        "HEAD_SIZE": weights.head_size,
        "ROTATING": weights.cos_sin.shape[1],
        "HALF": max(16, triton.next_power_of_2(weights.head_size // 2)),
        "IS_NEOX": weights.is_neox,
    }


@triton.jit
def _pairs(
    HEAD_SIZE: tl.constexpr, ROTATING: tl.constexpr, HALF: tl.constexpr, IS_NEOX: tl.constexpr
):
    """Dimensions of each pair's first and second member, and which pairs there are."""
    pair = tl.arange(0, HALF)
    first, second = 2 * pair, 2 * pair + 1
    if IS_NEOX:
        rest = pair + ROTATING // 2
        first = tl.where(pair < ROTATING // 2, pair, rest)
        second = tl.where(pair < ROTATING // 2, rest, pair + HEAD_SIZE // 2)
    return pair, first, second, pair < HEAD_SIZE // 2


@triton.jit
def _store(
    first,  # [ROWS, HALF] fp32, projections of the first member of each pair
    second,
    row,
    slot,  # [ROWS] int64
    layer,
    is_value,
    head,
    positions,
    k_norm,
    cos_sin,
    cos_sin_stride,
    eps,
    value_factor,
    like_caches,
    addresses,
    scales,
    block_size,
    block_stride,
    slot_stride,
    head_stride,
    element_type: tl.constexpr,  # of the states
    HEAD_SIZE: tl.constexpr,
    ROTATING: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Norm and rotation of a key head, or the factor of a value head, and the write."""
    pair, first_dim, second_dim, is_pair = _pairs(HEAD_SIZE, ROTATING, HALF, IS_NEOX)
    first = first.to(element_type).to(tl.float32)
    second = second.to(element_type).to(tl.float32)
    if is_value != 0:
        first *= value_factor
        second *= value_factor
    else:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_SIZE
        factor = tl.rsqrt(mean + eps)[:, None]
        norm = k_norm + layer * HEAD_SIZE
        first_norm = tl.load(norm + first_dim, mask=is_pair, other=0.0).to(tl.float32)
        second_norm = tl.load(norm + second_dim, mask=is_pair, other=0.0).to(tl.float32)
        first = first * factor * first_norm[None, :]
        second = second * factor * second_norm[None, :]
        # Rows without a slot need not have a position either.
        position = tl.load(positions + row, mask=slot >= 0, other=0).to(tl.int64)
        angles = cos_sin + position[:, None] * cos_sin_stride + pair[None, :]
        turns = (slot >= 0)[:, None] & (pair < ROTATING // 2)[None, :]
        cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(angles + ROTATING // 2, mask=turns, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    first = first.to(element_type).to(tl.float32)
    second = second.to(element_type).to(tl.float32)
    cache_type = like_caches.dtype.element_ty
    if cache_type == tl.float8e4nv:
        scale = tl.load(scales + layer * 2 + is_value)
        first = tl.clamp(first / scale, -_LARGEST_FP8, _LARGEST_FP8)
        second = tl.clamp(second / scale, -_LARGEST_FP8, _LARGEST_FP8)
    address = tl.load(addresses + layer * 2 + is_value)
    cache = tl.multiple_of(address.to(tl.pointer_type(cache_type)), 16)
    place = slot // block_size * block_stride + slot % block_size * slot_stride
    place += head.to(tl.int64) * head_stride
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
    positions,  # [T] int64
    slots,  # [L, T] int64
    slots_stride,
    k_norm,  # [L, D]
    cos_sin,  # [max_position, R]
    cos_sin_stride,
    eps,
    value_factor,
    like_caches,  # a cache, for its type
    addresses,  # [L, 2] int64
    scales,  # [L, 2] fp32
    block_size,
    block_stride,
    slot_stride,
    head_stride,
    HIDDEN_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTATING: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    head = tl.program_id(1)  # of all layers' keys and values
    layer = head // (2 * NUM_HEADS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + layer * slots_stride + row, mask=row < num_tokens, other=-1)
    if tl.max(slot, 0) < 0:  # padding of a captured graph, or rejected drafts
        return
    _, first_dim, second_dim, is_pair = _pairs(HEAD_SIZE, ROTATING, HALF, IS_NEOX)
    rows_of_head = head.to(tl.int64) * HEAD_SIZE
    first_rows = projection + (rows_of_head + first_dim)[None, :] * projection_stride
    second_rows = projection + (rows_of_head + second_dim)[None, :] * projection_stride
    token = states + row[:, None].to(tl.int64) * states_stride
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    first = tl.zeros((ROWS, HALF), dtype=tl.float32)
    second = tl.zeros((ROWS, HALF), dtype=tl.float32)
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
    factor = tl.rsqrt(squares / HIDDEN_SIZE + eps)[:, None]
    first *= factor
    second *= factor
    if HAS_BIAS:
        of_head = bias + rows_of_head
        first += tl.load(of_head + first_dim, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        second += tl.load(of_head + second_dim, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    _store(
        first,
        second,
        row,
        slot,
        layer,
        head // NUM_HEADS % 2,
        head % NUM_HEADS,
        positions,
        k_norm,
        cos_sin,
        cos_sin_stride,
        eps,
        value_factor,
        like_caches,
        addresses,
        scales,
        block_size,
        block_stride,
        slot_stride,
        head_stride,
        states.dtype.element_ty,
        HEAD_SIZE,
        ROTATING,
        HALF,
        IS_NEOX,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _store_projected_kernel(
    projected,  # [T, L * 2 * N * D]
    projected_stride,
    num_tokens,
    positions,
    slots,
    slots_stride,
    k_norm,
    cos_sin,
    cos_sin_stride,
    eps,
    value_factor,
    like_caches,
    addresses,
    scales,
    block_size,
    block_stride,
    slot_stride,
    head_stride,
    ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTATING: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """From `positions` on, arguments are those of `_project_and_store_kernel`."""
    head = tl.program_id(1)
    layer = head // (2 * NUM_HEADS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + layer * slots_stride + row, mask=row < num_tokens, other=-1)
    if tl.max(slot, 0) < 0:
        return
    _, first_dim, second_dim, is_pair = _pairs(HEAD_SIZE, ROTATING, HALF, IS_NEOX)
    used = (slot >= 0)[:, None] & is_pair[None, :]
    token = projected + row[:, None].to(tl.int64) * projected_stride + head * HEAD_SIZE
    first = tl.load(token + first_dim[None, :], mask=used, other=0.0)
    second = tl.load(token + second_dim[None, :], mask=used, other=0.0)
    _store(
        first,
        second,
        row,
        slot,
        layer,
        head // NUM_HEADS % 2,
        head % NUM_HEADS,
        positions,
        k_norm,
        cos_sin,
        cos_sin_stride,
        eps,
        value_factor,
        like_caches,
        addresses,
        scales,
        block_size,
        block_stride,
        slot_stride,
        head_stride,
        projected.dtype.element_ty,
        HEAD_SIZE,
        ROTATING,
        HALF,
        IS_NEOX,
    )
