"""Per-request diffusion state: pre-allocated device tensors, one slot a request.

The slot index is the runner's request-state index. Slots are only ever written in place, so the
tensors keep their addresses. What a step reads of every request lies together, because on small
batches an operation costs the same whatever it moves.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.requests.ends import MAX_STOP_TOKENS

_PROGRESS = ("numbers", "tokens", "canvas", "soft_embeds", "pinned", "revealed")


Index: TypeAlias = slice | torch.Tensor
"""n rows of a tensor: [n] int64, or consecutive ones, of which nothing is copied: what is read that
way changes with the next write."""


def index_of(rows: np.ndarray, on_device: torch.Tensor) -> Index:
    """The index of `rows` [n], of which `on_device` is a copy."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return on_device


class SlotNumbers(NamedTuple):
    """Of n slots, each [n] int64. A step changes the first three."""

    steps_done: torch.Tensor  # denoising steps taken on the current canvas
    is_committing: torch.Tensor  # 1 = the next forward commits the canvas, 0 = it denoises
    times_repeated: torch.Tensor  # steps on end that the best guess has stood still
    noise_key: torch.Tensor  # of the request's seed
    num_steps: torch.Tensor  # the request's step cap
    end: torch.Tensor  # absolute position: a block that ends there or later is the last one


class SlotTokens(NamedTuple):
    """Of n slots."""

    best_guess: torch.Tensor  # [n, C] int64, last step's: what a commit of its own emits
    first_canvas: torch.Tensor  # [n, C] int64, the caller's tokens at pinned positions


@dataclass
class CanvasSlots:
    """R = most requests at once, C = canvas length, H = hidden size."""

    canvas: torch.Tensor  # [R, C] int64, tokens the next forward reads: the runner's draft tokens
    numbers: torch.Tensor  # [R, 6] int64, `SlotNumbers`
    tokens: torch.Tensor  # [R, 2, C] int64, `SlotTokens`
    soft_embeds: torch.Tensor  # [R, C, H] model dtype, expected embedding of last step's softmax
    pinned: torch.Tensor  # [R, C] bool, positions held at `first_canvas`
    revealed: torch.Tensor  # [R, C] bool, positions of the canvas that are revealed for good
    stop_tokens: torch.Tensor  # [R, MAX_STOP_TOKENS] int64
    symmetric_window: torch.Tensor  # [R] int32, 1 = symmetric window rule, 0 = reference
    width: torch.Tensor  # [R] int64, canvas length the request asked for, 1..C
    fitted_end: torch.Tensor  # [R] int64, absolute position: no canvas reaches far behind it

    @classmethod
    def allocate(
        cls,
        canvas: torch.Tensor,  # [R, C] int64
        hidden_size: int,
        dtype: torch.dtype,
    ) -> "CanvasSlots":
        R, C = canvas.shape

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=canvas.device)

        return cls(
            canvas=canvas,
            numbers=zeros(R, len(SlotNumbers._fields), dtype=torch.int64),
            tokens=zeros(R, len(SlotTokens._fields), C, dtype=torch.int64),
            soft_embeds=zeros(R, C, hidden_size, dtype=dtype),
            pinned=zeros(R, C, dtype=torch.bool),
            revealed=zeros(R, C, dtype=torch.bool),
            stop_tokens=zeros(R, MAX_STOP_TOKENS, dtype=torch.int64),
            symmetric_window=zeros(R, dtype=torch.int32),
            width=zeros(R, dtype=torch.int64),
            fitted_end=zeros(R, dtype=torch.int64),
        )

    def reset(
        self,
        slot: int,
        *,
        seed: int,
        num_steps: int,
        end: int,
        stop_tokens: list[int],  # [MAX_STOP_TOKENS]
        width: int,
        fitted_end: int,
    ) -> None:
        """Prepares a slot for a new or resumed request, with nothing denoised yet."""
        numbers = SlotNumbers(
            steps_done=torch.tensor(0),
            is_committing=torch.tensor(0),
            times_repeated=torch.tensor(0),
            noise_key=noise.keys(torch.tensor(seed)),
            num_steps=torch.tensor(num_steps),
            end=torch.tensor(end),
        )
        self.numbers[slot] = torch.stack(numbers).to(self.numbers.device)
        self.tokens[slot].fill_(NO_TOKEN)
        self.soft_embeds[slot].zero_()
        self.pinned[slot].fill_(False)
        self.revealed[slot].fill_(False)
        self.width[slot].fill_(width)
        self.fitted_end[slot].fill_(fitted_end)
        self.stop_tokens[slot] = async_tensor_h2d(np.array(stop_tokens), device=self.canvas.device)

    def read_numbers(self, idx: Index) -> SlotNumbers:
        return SlotNumbers(*self.numbers[idx].unbind(dim=-1))

    def read_tokens(self, idx: Index) -> SlotTokens:
        return SlotTokens(*self.tokens[idx].unbind(dim=1))

    def is_committing(self, idx: Index) -> torch.Tensor:
        """[n] bool, of the slots `idx` [n]."""
        return self.numbers[idx, 1] == 1

    def write(
        self,
        idx: Index,
        best_guess: torch.Tensor,  # [n, C] int64
        steps_done: torch.Tensor,  # [n] int64
        is_committing: torch.Tensor,  # [n] bool
        times_repeated: torch.Tensor,  # [n] int64
    ) -> None:
        """Stores what a step leaves for the next one."""
        self.tokens[idx, 0] = best_guess
        progress = (steps_done, is_committing.long(), times_repeated)
        self.numbers[idx, : len(progress)] = torch.stack(progress, dim=1)

    def pin(self, slot: int, first_canvas: list[int], positions: list[int]) -> None:
        """Holds the `positions` of the request's first canvas at the tokens they have there."""
        device = self.tokens.device
        self.tokens[slot, -1, : len(first_canvas)] = torch.tensor(first_canvas, device=device)
        self.pinned[slot, torch.tensor(positions, device=device)] = True

    def progress(self, idx: Index) -> dict[str, torch.Tensor]:
        """Copies of everything a step changes, for the slots `idx` [n]."""
        return {name: getattr(self, name)[idx].clone() for name in _PROGRESS}

    def take_back(
        self,
        idx: Index,
        taken_back: torch.Tensor,  # [n] bool, slots that return to their earlier progress
        earlier: dict[str, torch.Tensor],
    ) -> None:
        for name, before in earlier.items():
            now = getattr(self, name)
            mask = taken_back.view(-1, *[1] * (now.dim() - 1))
            now[idx] = torch.where(mask, before, now[idx])
