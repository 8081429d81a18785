"""Per-request diffusion state: pre-allocated device tensors, one slot a request.

The slot index is the runner's request-state index. Slots are only ever written in place, so the
tensors keep their addresses.
"""

from dataclasses import dataclass

import torch

from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.stopping import MAX_STOP_TOKENS

_PROGRESS = (
    "canvas",
    "best_guess",
    "history",
    "soft_embeds",
    "steps_done",
    "is_committing",
    "pinned",
)


@dataclass
class CanvasSlots:
    """R = most requests at once, C = canvas length, S = stability threshold, H = hidden size."""

    canvas: torch.Tensor  # [R, C] int64, tokens the next forward reads
    best_guess: torch.Tensor  # [R, C] int64, last step's argmax: what a commit emits
    history: torch.Tensor  # [R, S, C] int64, earlier best guesses
    soft_embeds: torch.Tensor  # [R, C, H] model dtype, expected embedding of last step's softmax
    steps_done: torch.Tensor  # [R] int32
    num_steps: torch.Tensor  # [R] int32, the request's step cap
    is_committing: torch.Tensor  # [R] int32, 1 = the next forward commits the canvas, 0 = denoises
    seeds: torch.Tensor  # [R] int64, keys of the request's noise
    first_canvas: torch.Tensor  # [R, C] int64, tokens of the caller's first canvas
    has_first_canvas: torch.Tensor  # [R] bool
    pinned: torch.Tensor  # [R, C] bool, positions held at `first_canvas`
    read_only: torch.Tensor  # [R] bool, emits on the converging step, without a commit
    end: torch.Tensor  # [R] int64, absolute position after the last token the request may have
    stop_tokens: torch.Tensor  # [R, MAX_STOP_TOKENS] int64
    symmetric_window: torch.Tensor  # [R] int32, 1 = symmetric window rule, 0 = reference
    width: torch.Tensor  # [R] int64, canvas length the request asked for, 1..C

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        canvas_length: int,
        stability_threshold: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "CanvasSlots":
        R, C = max_num_reqs, canvas_length

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            canvas=zeros(R, C, dtype=torch.int64),
            best_guess=zeros(R, C, dtype=torch.int64),
            history=zeros(R, stability_threshold, C, dtype=torch.int64),
            soft_embeds=zeros(R, C, hidden_size, dtype=dtype),
            steps_done=zeros(R, dtype=torch.int32),
            num_steps=zeros(R, dtype=torch.int32),
            is_committing=zeros(R, dtype=torch.int32),
            seeds=zeros(R, dtype=torch.int64),
            first_canvas=zeros(R, C, dtype=torch.int64),
            has_first_canvas=zeros(R, dtype=torch.bool),
            pinned=zeros(R, C, dtype=torch.bool),
            read_only=zeros(R, dtype=torch.bool),
            end=zeros(R, dtype=torch.int64),
            stop_tokens=zeros(R, MAX_STOP_TOKENS, dtype=torch.int64),
            symmetric_window=zeros(R, dtype=torch.int32),
            width=zeros(R, dtype=torch.int64),
        )

    def reset(self, slot: int, seed: int, num_steps: int, width: int) -> None:
        """Prepares a slot for a new or resumed request: prefilling, with nothing denoised yet."""
        self.history[slot].fill_(NO_TOKEN)
        self.soft_embeds[slot].zero_()
        self.steps_done[slot].zero_()
        self.num_steps[slot].fill_(num_steps)
        self.is_committing[slot].zero_()
        self.seeds[slot].fill_(seed)
        self.has_first_canvas[slot].fill_(False)
        self.pinned[slot].fill_(False)
        self.read_only[slot].fill_(False)
        self.symmetric_window[slot].zero_()
        self.width[slot].fill_(width)

    def set_first_canvas(self, slot: int, tokens: list[int], pinned: list[int]) -> None:
        """Makes `tokens` the request's first canvas, holding the `pinned` positions at them."""
        device = self.first_canvas.device
        self.first_canvas[slot, : len(tokens)] = torch.tensor(tokens, device=device)
        self.has_first_canvas[slot].fill_(True)
        if pinned:
            self.pinned[slot, torch.tensor(pinned, device=device)] = True

    def progress(self, idx: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of everything a step changes, for the slots `idx` [n]."""
        return {name: getattr(self, name)[idx] for name in _PROGRESS}

    def take_back(
        self,
        idx: torch.Tensor,  # [n] int64
        taken_back: torch.Tensor,  # [n] bool, slots that return to their earlier progress
        earlier: dict[str, torch.Tensor],
    ) -> None:
        for name, before in earlier.items():
            now = getattr(self, name)
            mask = taken_back.view(-1, *[1] * (now.dim() - 1))
            now[idx] = torch.where(mask, before, now[idx])
