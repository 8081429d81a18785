"""Keeps the target's hidden states until the drafter computes keys and values from them in bulk."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """What a drafter needs of n tokens to compute its keys and values for them."""

    states: torch.Tensor  # [n, num_layers * hidden_size], the target's, layers side by side
    positions: torch.Tensor  # [n] int64
    slots: torch.Tensor  # [num_groups, n] int64, places in the drafter's KV cache


class PendingContext:
    """Buffers for the context of at most `capacity` tokens that no draft needs yet. They are
    allocated with the first tokens, on the device of these."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_tokens = 0
        self._buffers: Context | None = None

    @property
    def room(self) -> int:
        """The number of tokens that still fit."""
        return self.capacity - self._num_tokens

    def append(
        self,
        states: list[torch.Tensor],  # of each layer [n, hidden_size]; n at most `room`
        positions: torch.Tensor,  # [n] int64
        slots: torch.Tensor,  # [num_groups, n] int64
    ) -> None:
        """Copies the context of n tokens behind the tokens that are in the buffers."""
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

    def pop_all(self) -> Context | None:
        """Empties the buffers. Returns views of what was in them, which the next `append`
        overwrites; None if they were empty."""
        if self._buffers is None or self._num_tokens == 0:
            return None
        taken = slice(0, self._num_tokens)
        self._num_tokens = 0
        buffers = self._buffers
        return Context(buffers.states[taken], buffers.positions[taken], buffers.slots[:, taken])
