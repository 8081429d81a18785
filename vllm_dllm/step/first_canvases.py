"""Canvases that clients bring, and the positions of them that stay as they are."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.registry import NewRequest
from vllm_dllm.step.slots import CanvasSlots, Index


class FirstCanvases:
    """A request's first block alone starts from its canvas and keeps its pins."""

    def __init__(self, slots: CanvasSlots) -> None:
        self._slots = slots
        self._added: dict[int, tuple[list[int], list[int]]] = {}  # slot -> canvas, pinned positions
        self._pinned: set[int] = set()

    def add(self, request: NewRequest) -> None:
        # After a preemption the first block may be over; a canvas of noise then goes on anywhere.
        canvas = request.options.seed_canvas
        if canvas is not None and not request.is_resumed:
            self._added[request.slot] = (canvas, request.options.pinned)

    def start(self) -> None:
        for slot, (canvas, positions) in self._added.items():
            tokens = self._to_device(canvas)
            self._slots.canvas[slot, : len(canvas)] = tokens
            if positions:
                self._slots.pin(slot, tokens, self._to_device(positions))
                self._pinned.add(slot)
        self._added.clear()

    def drop(self, slot: int) -> None:
        self._added.pop(slot, None)
        self._pinned.discard(slot)

    def has_pins(self, batch: CanvasBatch) -> bool:
        return not self._pinned.isdisjoint(batch.slots_np.tolist())

    def keep_pins(
        self,
        idx: Index,
        ended: torch.Tensor,  # [n, 1] bool, blocks after which another one starts
    ) -> torch.Tensor:
        """[n, C] bool: positions that the next step, too, finds as the client gave them."""
        pinned = self._slots.pinned[idx] & ~ended
        self._slots.pinned[idx] = pinned
        return pinned

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return async_tensor_h2d(np.array(values, dtype=np.int64), device=self._slots.canvas.device)
