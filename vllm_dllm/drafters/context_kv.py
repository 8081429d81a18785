"""Keys and values of a drafter's context, computed straight from the target's states.

The context never runs through a drafter's layers: each layer's keys and values of a token are two
projections of one vector, the token's states after `fc`. So all layers' entries are written into
the paged cache at once, for exactly the tokens whose states have become known. This file is the
definition of right, in plain operations; `context_kv_triton` does it on a GPU.

Legend: T tokens, H hidden size, L drafter layers, N key heads (of this rank), D head size, R of its
dimensions rotate.
"""

from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dllm.drafters.context import FP8, LARGEST_FP8, ContextWeights, DrafterCaches


def store_context_kv_(
    states: Tensor,  # [T, H] after `fc`, before `hidden_norm`
    positions: Tensor,  # [T] int64
    slots: Tensor,  # [T], or [L, T] if layers have separate cache groups; int64, -1: not written
    weights: ContextWeights,
    caches: DrafterCaches,
) -> None:
    """Writes all layers' keys and values of the tokens at their slots of the caches."""
    if slots.dim() == 1:
        slots = slots.expand(weights.num_layers, -1)
    if states.is_cuda:
        _triton().store_context_kv_(states, positions, slots, weights, caches)
        return
    keys, values = context_kv(states, positions, weights)
    block_size = caches.keys[0].shape[1]
    for layer, layer_slots in enumerate(slots):
        written = layer_slots >= 0
        blocks, offsets = layer_slots[written] // block_size, layer_slots[written] % block_size
        for new, cache_, scale in (
            (keys[layer], caches.keys[layer], caches.scales[layer, 0]),
            (values[layer], caches.values[layer], caches.scales[layer, 1]),
        ):
            _bits(cache_)[blocks, offsets] = _bits(_as_cached(new[written], cache_.dtype, scale))


def context_kv(
    states: Tensor,  # [T, H]
    positions: Tensor,  # [T] int64
    weights: ContextWeights,
) -> tuple[Tensor, Tensor]:
    """Keys and values [L, T, N, D] in the states' dtype. The normalised states and their
    projections are rounded to it as well; everything else is computed in fp32."""
    num_heads, head_size = weights.num_kv_heads, weights.head_size
    normed = F.rms_norm(states, states.shape[-1:], weights.hidden_norm, weights.eps)
    projected = F.linear(normed, weights.projection, weights.bias).float()
    projected = projected.view(len(states), weights.num_layers, 2, num_heads, head_size)
    keys, values = projected.permute(2, 1, 0, 3, 4)
    k_norm = weights.k_norm.float()[:, None, None]
    keys = F.rms_norm(keys, (head_size,), eps=weights.eps) * k_norm
    keys = _rotate(keys, weights.cos_sin[positions].float(), weights.is_neox)
    return keys.to(states.dtype), (values * weights.value_factor).to(states.dtype)


def _rotate(
    keys: Tensor,  # [L, T, N, D] fp32
    cos_sin: Tensor,  # [T, R] fp32
    is_neox: bool,
) -> Tensor:
    rotating, rest = keys.split((cos_sin.shape[1], keys.shape[-1] - cos_sin.shape[1]), dim=-1)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    if is_neox:
        first, second = rotating.chunk(2, dim=-1)
    else:
        first, second = rotating[..., ::2], rotating[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((rotated, rest), dim=-1)


def _as_cached(new: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    if dtype != FP8:
        return new.to(dtype)
    return (new.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as uint8 if it is fp8, which PyTorch cannot scatter."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


@cache
def _triton() -> ModuleType:
    from vllm_dllm.drafters import context_kv_triton  # needs Triton

    return context_kv_triton
