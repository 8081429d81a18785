"""Target states that the drafter has not read yet, kept until it drafts."""

from dataclasses import dataclass

import torch


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
