"""Per-request diffusion state: pre-allocated device tensors, one slot a request.

The slot index is the runner's request-state index. Slots are only written in place, so the tensors
keep their addresses. Numbers that a step reads of each request are columns of one tensor, because
on small batches an operation costs the same whatever it moves. Parts of a step keep what only some
requests ask for by slot, too (`Registry`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise import noise
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.requests.ends import MAX_FORESEEN_STOPS, NEVER
from vllm_dllm.requests.options import RequestOptions

# The tensors of `CanvasSlots` that a step changes.
_CHANGED_BY_STEPS = (
    "numbers",
    "tokens",
    "canvas",
    "soft_embeds",
    "pinned",
    "revealed",
    "holds_draft",
)


Index: TypeAlias = slice | torch.Tensor
"""The index of n rows: [n] int64, or a slice of consecutive rows, which reads a view that changes
with the next write."""


def slice_if_consecutive(rows: np.ndarray, on_device: torch.Tensor) -> Index:
    """Returns `rows` [n], at least one, as a slice if they are consecutive, else `on_device`, their
    copy on the device."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return on_device


class SlotNumbers(NamedTuple):
    """The numbers of n slots, each [n] int64. Steps change the first three."""

    steps_done: torch.Tensor  # denoising steps taken on the current canvas
    is_committing: torch.Tensor  # 1 = the next forward commits the canvas, 0 = it denoises
    times_repeated: torch.Tensor  # consecutive steps in which the best guess has not changed
    noise_key: torch.Tensor  # of the request's seed
    num_steps: torch.Tensor  # the request's step cap
    end: torch.Tensor  # absolute position: a block that ends there or later is the last one
    width: torch.Tensor  # canvas length the request asked for, 1..C
    fitted_end: torch.Tensor  # absolute position: canvases are fitted to it (`narrowed_width`)
    symmetric_window: torch.Tensor  # 1 = symmetric window rule, 0 = reference


_COLUMN = {name: i for i, name in enumerate(SlotNumbers._fields)}


class SlotTokens(NamedTuple):
    """The tokens of n slots."""

    best_guess: torch.Tensor  # [n, C] int64, of the last step, which a commit of its own emits
    first_canvas: torch.Tensor  # [n, C] int64, the client's tokens at pinned positions


class CanvasSlots:
    """The device tensors of all slots. R = most requests at once, C = canvas length, H = hidden
    size. `host_numbers` and `num_stops` are on the host. They hold the values that requests came
    with, and do not change with steps."""

    def __init__(
        self,
        canvas: torch.Tensor,  # [R, C] int64, tokens the next forward reads: the runner's drafts
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        R, C = canvas.shape
        zeros = partial(torch.zeros, device=canvas.device)
        self.canvas = canvas
        self.numbers = zeros(R, len(SlotNumbers._fields), dtype=torch.int64)
        self.columns = SlotNumbers(*self.numbers.unbind(dim=-1))  # views of all slots
        self.tokens = zeros(R, len(SlotTokens._fields), C, dtype=torch.int64)  # `SlotTokens`
        self.best_guess, self.first_canvas = self.tokens.unbind(dim=1)  # views of all slots
        # [R, C, H] model dtype: expected embedding of last step's softmax
        self.soft_embeds = zeros(R, C, hidden_size, dtype=dtype)
        self.pinned = zeros(R, C, dtype=torch.bool)  # positions held at `first_canvas`
        self.revealed = zeros(R, C, dtype=torch.bool)  # positions that are revealed for good
        self.holds_draft = zeros(R, 1, dtype=torch.bool)  # whether hidden positions hold a draft
        self.stop_tokens = zeros(R, MAX_FORESEEN_STOPS, dtype=torch.int64)
        self.host_numbers = np.zeros((R, len(SlotNumbers._fields)), dtype=np.int64)
        self.num_stops = np.zeros(R, dtype=np.int64)
        self._host_stops = np.zeros((R, MAX_FORESEEN_STOPS), dtype=np.int64)
        self._added: list[int] = []

    def stage_request(
        self,
        slot: int,
        stop_tokens: list[int],  # at most MAX_FORESEEN_STOPS
        **numbers: int,
    ) -> None:
        """Stages a new or resumed request, with nothing denoised yet, for `apply_staged_writes`.
        `numbers`: fields of `SlotNumbers`, others are 0; as `noise_key` the request's seed."""
        assert numbers.keys() <= _COLUMN.keys(), "fields of SlotNumbers"
        self.host_numbers[slot] = [numbers.get(name, 0) for name in SlotNumbers._fields]
        self._host_stops[slot] = NEVER
        self._host_stops[slot, : len(stop_tokens)] = stop_tokens
        self.num_stops[slot] = len(stop_tokens)
        self._added.append(slot)

    def apply_staged_writes(self) -> tuple[np.ndarray, torch.Tensor]:
        """Writes the n slots staged since the last step, in few copies, without waiting for the
        device. Returns their indices [n] int64, on the host and on the device."""
        slots_np = np.unique(np.array(self._added, dtype=np.int64))
        self._added.clear()
        device = self.canvas.device
        idx = async_tensor_h2d(slots_np, device=device)
        numbers = self.host_numbers[slots_np]
        seeds = torch.from_numpy(numbers[:, _COLUMN["noise_key"]])
        numbers[:, _COLUMN["noise_key"]] = noise.keys_from_seeds(seeds).numpy()
        self.numbers[idx] = async_tensor_h2d(numbers, device=device)
        self.stop_tokens[idx] = async_tensor_h2d(self._host_stops[slots_np], device=device)
        self.tokens.index_fill_(0, idx, NO_TOKEN)
        self.soft_embeds.index_fill_(0, idx, 0.0)
        self.pinned.index_fill_(0, idx, False)
        self.revealed.index_fill_(0, idx, False)
        self.holds_draft.index_fill_(0, idx, False)
        return slots_np, idx

    @property
    def has_staged(self) -> bool:
        """Returns whether requests wait for `apply_staged_writes`."""
        return bool(self._added)

    def host_values(self, name: str, slots_np: np.ndarray) -> np.ndarray:
        """Returns [n] int64: the field `name` of `SlotNumbers` for the slots `slots_np` [n]. It
        must be a field that steps do not change."""
        return self.host_numbers[slots_np, _COLUMN[name]]

    def read_numbers(self, idx: Index) -> SlotNumbers:
        """Returns the numbers of slots `idx` [n]; of a slice, views that the next write changes."""
        return SlotNumbers(*self.numbers[idx].unbind(dim=-1))

    def read_tokens(self, idx: Index) -> SlotTokens:
        """Returns the tokens of slots `idx` [n]; of a slice, views that the next write changes."""
        return SlotTokens(*self.tokens[idx].unbind(dim=1))

    def are_committing(self, idx: Index) -> torch.Tensor:
        """Returns [n] bool: slots `idx` whose canvas the next forward commits."""
        return self.columns.is_committing[idx] == 1

    def write_progress(
        self,
        idx: Index,
        best_guess: torch.Tensor,  # [n, C] int64
        steps_done: torch.Tensor,  # [n] int64
        is_committing: torch.Tensor,  # [n] bool
        times_repeated: torch.Tensor,  # [n] int64
    ) -> None:
        """Overwrites the progress of slots `idx` [n] with what a step leaves for the next one."""
        self.best_guess[idx] = best_guess
        progress = (steps_done, is_committing.long(), times_repeated)
        self.numbers[idx, : len(progress)] = torch.stack(progress, dim=1)

    def pin_tokens(
        self,
        slot: int,
        first_canvas: torch.Tensor,  # [L] int64, L <= C
        positions: torch.Tensor,  # [k] int64
    ) -> None:
        """Pins `positions` of a slot's first canvas to the tokens that `first_canvas` has there."""
        self.first_canvas[slot, : len(first_canvas)] = first_canvas
        self.pinned[slot].index_fill_(0, positions, True)

    def snapshot(self, idx: Index) -> dict[str, torch.Tensor]:
        """Returns copies of everything that a step changes in the slots `idx` [n], by name."""
        return {name: getattr(self, name)[idx].clone() for name in _CHANGED_BY_STEPS}

    def restore(
        self,
        idx: Index,
        taken_back: torch.Tensor,  # [n] bool, slots that are restored
        earlier: dict[str, torch.Tensor],
    ) -> None:
        """Overwrites the slots `idx` [n] that are `taken_back` with `earlier`, from `snapshot`."""
        for name, before in earlier.items():
            now = getattr(self, name)
            mask = taken_back.view(-1, *[1] * (now.dim() - 1))
            now[idx] = torch.where(mask, before, now[idx])


@dataclass(frozen=True)
class NewRequest:
    """A request that is new to the worker, or comes back after a preemption."""

    slot: int
    params: SamplingParams
    options: RequestOptions
    prompt_len: int  # tokens
    prefill_len: int  # tokens; after a preemption with the blocks committed so far
    num_steps: int  # denoise steps that a canvas may take

    @property
    def is_resumed(self) -> bool:
        """Returns whether a preemption has interrupted its answer."""
        return self.prefill_len > self.prompt_len


class Registry(ABC):
    """A part that keeps what requests ask for. `StepRequests` tells it when they come and go."""

    @abstractmethod
    def add_request(self, request: NewRequest) -> None:
        """Keeps what the request asks for. `remove_request` was called for the slot before. Copies
        to the device may be left to `apply_staged_writes`."""

    def apply_staged_writes(self) -> None:  # noqa: B027
        """Copies to the device what was added since the last step; nothing in this class. Called
        when the runner has written the new requests' tokens."""

    @abstractmethod
    def remove_request(self, slot: int) -> None:
        """Forgets what the slot's request asked for. Does nothing if it asked for nothing."""
