"""The canvases that clients send, and their pinned positions, which keep their tokens."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.registry import NewRequest
from vllm_dllm.step.slots import CanvasSlots, Index


class FirstCanvases:
    """Writes the canvases that clients send into slots. Only the first block of a request starts
    from its canvas and keeps its pins."""

    def __init__(self, slots: CanvasSlots) -> None:
        self._slots = slots
        self._added: dict[int, tuple[list[int], list[int]]] = {}  # slot -> canvas, pinned positions
        self._pinned: set[int] = set()

    def add_request(self, request: NewRequest) -> None:
        """Stages the canvas that the request brings, if any. Skips a request that comes back after
        a preemption."""
        # After a preemption the first block may be over; a canvas of noise fits any block.
        canvas = request.options.seed_canvas
        if canvas is not None and not request.is_resumed:
            self._added[request.slot] = (canvas, request.options.pinned)

    def apply_staged_writes(self) -> None:
        """Writes staged canvases and pins into their slots, in place of the noise."""
        for slot, (canvas, positions) in self._added.items():
            tokens = self._to_device(canvas)
            self._slots.canvas[slot, : len(canvas)] = tokens
            if positions:
                self._slots.pin_tokens(slot, tokens, self._to_device(positions))
                self._pinned.add(slot)
        self._added.clear()

    def remove_request(self, slot: int) -> None:
        self._added.pop(slot, None)
        self._pinned.discard(slot)

    def has_pins(self, batch: CanvasBatch) -> bool:
        """Returns whether any request of the batch sent pinned positions."""
        return batch.any_in(self._pinned)

    def update_pins(
        self,
        idx: Index,
        ended: torch.Tensor,  # [n, 1] bool, blocks after which another one starts
    ) -> torch.Tensor:
        """Clears the pins of blocks that have ended, in the slots `idx` [n]. Returns [n, C] bool:
        positions that are still pinned."""
        pinned = self._slots.pinned[idx] & ~ended
        self._slots.pinned[idx] = pinned
        return pinned

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return async_tensor_h2d(np.array(values, dtype=np.int64), device=self._slots.canvas.device)
