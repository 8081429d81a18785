"""What canvases start from if clients say so: canvases of their own, and text that they expect."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.denoise import prediction
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import CanvasSlots, Index, NewRequest, Registry


class FirstCanvases(Registry):
    """Writes the canvases that clients send into slots. Only the first block of a request starts
    from its canvas. Its pinned positions keep their tokens."""

    def __init__(self, slots: CanvasSlots) -> None:
        self._slots = slots
        self._added: dict[int, tuple[list[int], list[int]]] = {}  # slot -> canvas, pinned positions
        self._pinned: set[int] = set()

    def add_request(self, request: NewRequest) -> None:
        """Stages the canvas that the request brings, if any. Skips one that was preempted."""
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


class Expected(NamedTuple):
    """The tokens that are expected in n blocks; NO_TOKEN where none is."""

    canvas: torch.Tensor  # [n, C] int64, tokens that the blocks start from
    guess: torch.Tensor  # [n, C] int64, tokens that the next best guess is compared with

    def fill_canvas(self, canvas: torch.Tensor) -> torch.Tensor:
        """Returns `canvas` [n, C] with expected tokens in place of its own where there are any."""
        return torch.where(self.canvas == NO_TOKEN, canvas, self.canvas)

    def fill_guess(self, guess: torch.Tensor) -> torch.Tensor:
        """Returns `guess` [n, C] with expected tokens in place of its own where there are any."""
        return torch.where(self.guess == NO_TOKEN, guess, self.guess)

    def spread_to_rows(self, rows: torch.Tensor, count: int) -> "Expected":
        """Returns what is expected of `count` blocks [count, C]. Block `rows[j]` gets row j of this
        object's k rows; the other blocks get NO_TOKEN."""
        nothing = self.canvas.new_full((count, self.canvas.shape[1]), NO_TOKEN)
        return Expected(*(nothing.index_copy(0, rows, of_rows) for of_rows in self))


class Predicted(NamedTuple):
    """The k canvases of a batch whose requests have a prediction."""

    rows: torch.Tensor  # [k] int64, indices in the batch
    slots: torch.Tensor  # [k] int64


class Predictions(Registry):
    """Starts blocks from the text that clients expect (`denoise.prediction`). Keeps predictions by
    slot, and the place that each answer has reached in its prediction. A request without one costs
    nothing.

    The expected tokens are also the guess that the first step is compared with, so a block that is
    as expected is finished by the one step that confirms it. Behind the prediction's end, the guess
    is stop tokens. The canvas holds one there and then noise: a wrong prediction may be too short,
    and a model rarely recovers from a canvas full of stop tokens.

    Where the first step's guess shows that the answer adds or leaves out tokens, the rest of the
    block is moved by as many. This is done once: a block whose guess is moved again and again
    finishes late.
    """

    def __init__(self, slots: CanvasSlots, req_states: RequestState) -> None:
        self._slots, self._req_states = slots, req_states
        device = slots.canvas.device
        # The predictions [R, longest so far], their lengths [R], and the answers' places in them
        # [R], where R is the number of slots.
        self._tokens = torch.empty(len(slots.canvas), 0, dtype=torch.int32, device=device)
        self._length = torch.zeros(len(slots.canvas), dtype=torch.int64, device=device)
        self._position = torch.zeros_like(self._length)
        self._added: dict[int, NewRequest] = {}
        self._predicted: set[int] = set()

    def add_request(self, request: NewRequest) -> None:
        """Stages the request's prediction for `apply_staged_writes`, if it has one."""
        if request.options.prediction_tokens:
            self._added[request.slot] = request
            self._predicted.add(request.slot)

    def apply_staged_writes(self) -> None:
        """Copies staged predictions to the device, and writes what is expected of first blocks to
        slots' canvases and guesses. A resumed request's first is the next block of its answer."""
        for slot, request in self._added.items():
            idx = slice(slot, slot + 1)
            self._store(idx, request.options.prediction_tokens)
            if request.is_resumed:  # its emitted tokens are followed block by block
                width = request.options.canvas_length or self._slots.canvas.shape[1]
                answers = self._req_states.all_token_ids.gpu[idx]
                for begin in range(request.prompt_len, request.prefill_len, width):
                    block = answers[:, begin : min(begin + width, request.prefill_len)].long()
                    emitted = torch.full_like(self._position[idx], block.shape[1])
                    self._position[idx] = prediction.locate_next_block(
                        self._tokens[idx], self._position[idx], block, emitted
                    )
            expected = self._expected(idx)
            self._slots.canvas[idx] = expected.fill_canvas(self._slots.canvas[idx])
            self._slots.best_guess[idx] = expected.guess  # which the first step is compared with
        self._added.clear()

    def remove_request(self, slot: int) -> None:
        self._added.pop(slot, None)
        self._predicted.discard(slot)

    def any_in(self, batch: CanvasBatch) -> bool:
        """Returns whether any request of the batch has a prediction."""
        return batch.any_in(self._predicted)

    def find_predicted(self, batch: CanvasBatch) -> Predicted | None:
        """Returns the canvases whose requests have a prediction; None if no request has one."""
        if not self.any_in(batch):
            return None
        rows = np.array(batch.canvases_in(self._predicted), dtype=np.int64)
        slots, device = batch.slots_np[rows].astype(np.int64), self._tokens.device
        return Predicted(
            async_tensor_h2d(rows, device=device), async_tensor_h2d(slots, device=device)
        )

    def expect_next_blocks(
        self,
        predicted: Predicted,
        blocks: torch.Tensor,  # [n, C] int64
        emitted: torch.Tensor,  # [n] int64, how many tokens of each block were emitted
    ) -> Expected:
        """Moves the place of each answer in its prediction on by the emitted tokens. Returns what
        is expected of the next n blocks."""
        rows, slots = predicted
        before, count = self._position[slots], emitted[rows]
        after = prediction.locate_next_block(self._tokens[slots], before, blocks[rows], count)
        self._position[slots] = torch.where(count > 0, after, before)
        return self._expected(slots).spread_to_rows(rows, len(blocks))

    def realign(
        self,
        predicted: Predicted,
        guess: torch.Tensor,  # [n, C] int64, of this step
        accepted: torch.Tensor,  # [n, C] bool
        valid: torch.Tensor | None,  # [n, C] bool, positions that are part of the canvas; None: all
        may_move: torch.Tensor,  # [n] bool, blocks that had their first step and are denoised on
    ) -> Expected:
        """Returns the expected tokens that move within the n blocks, because the first step's guess
        adds or leaves out tokens. NO_TOKEN where the step's own tokens stay. An accepted token
        stays, unless it only repeats what the canvas held."""
        rows, slots = predicted
        own = guess[rows]
        if valid is not None:
            own = torch.where(valid[rows], own, NO_TOKEN - 1)
        position = self._position[slots]
        before = prediction.next_places(position, own.shape[1])
        after = prediction.realign_block(self._tokens[slots], position, own)
        repeats = own == self._slots.canvas[slots]
        moves = (after != before) & (repeats | ~accepted[rows]) & may_move[rows, None]
        moved = self._expected_at(slots, after)
        moved = Expected(*(tokens.masked_fill(~moves, NO_TOKEN) for tokens in moved))
        return moved.spread_to_rows(rows, len(guess))

    def _expected(self, idx: Index) -> Expected:
        """Returns what is expected of the next block of the slots `idx` [k], fields [k, C]."""
        return self._expected_at(
            idx, prediction.next_places(self._position[idx], self._slots.canvas.shape[1])
        )

    def _expected_at(self, idx: Index, places: torch.Tensor) -> Expected:
        """Returns what is expected of canvases at `places` [k, C] of their predictions. Behind the
        prediction's end, the guess is stop tokens, and the canvas holds one of them."""
        length = self._length[idx]
        tokens = prediction.tokens_at(self._tokens[idx], places)
        guess = prediction.fill_behind_end(self._slots.stop_tokens[idx, 0], tokens, places, length)
        return Expected(torch.where(places == length[:, None], guess, tokens), guess)

    def _store(self, idx: slice, tokens: list[int]) -> None:
        """Copies a request's prediction to the device, and sets its answer's place to 0. Replaces
        the table by a wider one if the prediction does not fit."""
        length, old = len(tokens), self._tokens
        if length > old.shape[1]:  # few predictions are longer than all before
            self._tokens = old.new_full((len(old), 1 << (length - 1).bit_length()), NO_TOKEN)
            self._tokens[:, : old.shape[1]] = old
        on_host = np.array(tokens, dtype=np.int32)
        self._tokens[idx] = NO_TOKEN
        self._tokens[idx, :length] = async_tensor_h2d(on_host, device=old.device)
        self._length[idx] = length
        self._position[idx] = 0
