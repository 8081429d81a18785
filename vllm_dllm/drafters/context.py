"""The weights that a drafter's context is computed with, the caches it is written to, and what
waits to be computed in bulk.

Legend: H hidden size, L drafter layers, N key heads (of this rank), D head size, R of its
dimensions rotate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


@dataclass(frozen=True)
class ContextWeights:
    """Turn states into keys and values, for all layers."""

    hidden_norm: Tensor  # [H]
    projection: Tensor  # [L * 2 * N * D, H]: of each layer the rows of its keys, then of its values
    k_norm: Tensor  # [L, D]
    cos_sin: Tensor  # [max_position, R]: R / 2 cosines, then their sines, as vLLM keeps them
    is_neox: bool  # True: dimension i turns with i + R / 2; False: 2 i with 2 i + 1
    eps: float
    bias: Tensor | None = None  # [L * 2 * N * D]
    value_factor: float = 1.0  # `attention_value_scale` of a DFlash config

    def __post_init__(self) -> None:
        rows, (layers, head_size) = len(self.projection), self.k_norm.shape
        if rows % (2 * layers * head_size):
            raise ValueError(
                f"expected projection with rows for keys and values of {layers} layers with heads "
                f"of {head_size}, a multiple of {2 * layers * head_size}, got {rows}"
            )
        if head_size % 2 or self.cos_sin.shape[1] % 2 or self.cos_sin.shape[1] > head_size:
            raise ValueError(
                f"expected an even head size and an even number of rotating dimensions within it, "
                f"got {head_size} and cos_sin with {self.cos_sin.shape[1]}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.k_norm)

    @property
    def head_size(self) -> int:
        return self.k_norm.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return len(self.projection) // (2 * self.num_layers * self.head_size)


@dataclass(frozen=True)
class DrafterCaches:
    """The paged caches of a drafter's layers; made once, after the engine has allocated them."""

    keys: Sequence[Tensor]  # of each layer [num_blocks, block_size, N, D], contiguous along D
    values: Sequence[Tensor]  # like keys
    scales: Tensor  # [L, 2] fp32: what a layer's stored keys and values are multiplied by when
    # read; only used with fp8 caches
    addresses: Tensor  # [L, 2] int64 on the caches' device

    @classmethod
    def of(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        scales: Tensor | None = None,
    ) -> "DrafterCaches":
        """Raises ValueError for caches that one launch cannot serve. vLLM's fp8 caches are uint8:
        pass views as float8_e4m3fn."""
        first = keys[0]
        for cache_ in (*keys, *values):
            if (cache_.shape, cache_.stride(), cache_.dtype) != (
                first.shape,
                first.stride(),
                first.dtype,
            ):
                raise ValueError(
                    f"expected the caches of all layers to be alike, got {_describe(first)} and "
                    f"{_describe(cache_)}"
                )
        if first.stride(-1) != 1:
            raise ValueError(f"expected caches contiguous along D, got strides {first.stride()}")
        if scales is None:
            scales = torch.ones(len(keys), 2, device=first.device)
        addresses = [[k.data_ptr(), v.data_ptr()] for k, v in zip(keys, values, strict=True)]
        return cls(keys, values, scales.float(), torch.tensor(addresses, device=first.device))


def _describe(cache_: Tensor) -> str:
    return f"{tuple(cache_.shape)} with strides {cache_.stride()} of {cache_.dtype}"


@dataclass(frozen=True)
class Context:
    """The context of n tokens."""

    states: torch.Tensor  # [n, num_layers * hidden_size], the target's, layers side by side
    positions: torch.Tensor  # [n] int64
    slots: torch.Tensor  # [num_groups, n] int64, in the drafter's cache


class PendingContext:
    """Target states that no draft needs yet, kept so that keys and values are computed in bulk.

    Up to `capacity` tokens, in buffers that are allocated when the first ones arrive.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_tokens = 0
        self._buffers: Context | None = None

    @property
    def room(self) -> int:
        return self.capacity - self._num_tokens

    def add(
        self,
        states: list[torch.Tensor],  # of each layer [n, hidden_size]; n at most `room`
        positions: torch.Tensor,  # [n] int64
        slots: torch.Tensor,  # [num_groups, n] int64
    ) -> None:
        if self._buffers is None:
            width = sum(each.shape[-1] for each in states)
            self._buffers = Context(
                states[0].new_empty(self.capacity, width),
                positions.new_empty(self.capacity),
                slots.new_empty(len(slots), self.capacity),
            )
        added = slice(self._num_tokens, self._num_tokens + len(positions))
        torch.cat(states, dim=-1, out=self._buffers.states[added])
        self._buffers.positions[added] = positions
        self._buffers.slots[:, added] = slots
        self._num_tokens = added.stop

    def take(self) -> Context | None:
        """All of it, to be used before anything is added; None if there is nothing."""
        if self._buffers is None or self._num_tokens == 0:
            return None
        taken = slice(0, self._num_tokens)
        self._num_tokens = 0
        buffers = self._buffers
        return Context(buffers.states[taken], buffers.positions[taken], buffers.slots[:, taken])
