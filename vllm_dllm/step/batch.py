"""The canvases of one scheduler step: which requests have one, and where its rows lie.

A batch is built from the runner's host-side metadata once a step, and reused while the next steps
have the same canvases, as most have. A request whose prefill goes on has no canvas. Tensors are
copied to the device asynchronously, so building a batch never waits for the device.
"""

from collections.abc import Container, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.step.slots import Index, slice_if_consecutive


@dataclass(frozen=True)
class CanvasBatch:
    """n requests with a canvas. Its rows are their canvas positions, one canvas after another. A
    canvas has fewer than C rows if its request asked for a shorter one or `max_model_len` cuts it
    off. Rows that are part of no canvas may follow it (`step.masked.drafting_step`)."""

    canvas_length: int  # C
    requests_np: np.ndarray  # [n] int64, indices in the batch
    slots_np: np.ndarray  # [n] int64, slots of those requests
    lengths_np: np.ndarray  # [n] int64, canvas positions of each request, 1..C
    requests: torch.Tensor  # [n] int64, `requests_np` on the device, like the next two
    slots: torch.Tensor  # [n] int64
    lengths: torch.Tensor  # [n] int64
    first_rows: torch.Tensor  # [n] int64, the row of each canvas' first position
    first_tokens: torch.Tensor  # [n] int64, the batch's token that each canvas begins with
    request_index: Index  # of `requests`
    slot_index: Index  # of `slots`
    cells: torch.Tensor | None  # [rows] int64, row -> request * C + position; None: all are full
    tokens: torch.Tensor | None  # [rows] int64, row -> token of the batch; None: rows = tokens
    behind: torch.Tensor | None = None  # [n] int64, the request's rows behind its canvas; None: 0

    @classmethod
    def build(
        cls, input_batch: InputBatch, canvas_length: int, device: torch.device
    ) -> "CanvasBatch":
        """Builds the batch of a step's canvases. Returns the same object again for canvases that
        lie where those of an earlier step did."""
        lengths = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        return cls.from_last_rows(input_batch, lengths, canvas_length, device)

    @classmethod
    def from_last_rows(
        cls,
        input_batch: InputBatch,
        lengths: np.ndarray,  # [num_reqs] int, number of each request's last rows that are chosen
        canvas_length: int,
        device: torch.device,
        behind: np.ndarray | None = None,  # [num_reqs] int, of these rows; None: 0
    ) -> "CanvasBatch":
        """Builds a batch of the last `lengths[i]` rows of each request i, or of those before the
        last `behind[i]`. Requests with length 0 are left out."""
        num_reqs = input_batch.num_reqs
        return cls._build(
            lengths.astype(np.int64).tobytes(),
            b"" if behind is None else behind.astype(np.int64).tobytes(),
            input_batch.query_start_loc_np[: num_reqs + 1].astype(np.int64).tobytes(),
            input_batch.idx_mapping_np[:num_reqs].astype(np.int64).tobytes(),
            canvas_length,
            device,
        )

    @classmethod
    @lru_cache(maxsize=64)
    def _build(
        cls,
        lengths_of_all: bytes,
        behind_of_all: bytes,
        query_start_loc: bytes,
        idx_mapping: bytes,
        canvas_length: int,
        device: torch.device,
    ) -> "CanvasBatch":
        """Builds the batch of `from_last_rows`. Its arrays, int64, come as bytes, which can be keys
        of the cache."""
        of_all = np.frombuffer(lengths_of_all, dtype=np.int64)
        bounds = np.frombuffer(query_start_loc, dtype=np.int64)
        requests = np.flatnonzero(of_all > 0)
        lengths = of_all[requests]
        slots = np.frombuffer(idx_mapping, dtype=np.int64)[requests]

        # Position inside its canvas of every row, counted up from each canvas' first row.
        first_rows = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first_rows, lengths)
        cells = tokens = None
        if (lengths != canvas_length).any():
            cells = np.repeat(np.arange(len(requests)) * canvas_length, lengths) + positions
        # What is prefilled may precede a canvas.
        first_tokens, behind = bounds[requests + 1] - lengths, None
        if behind_of_all:
            behind = np.frombuffer(behind_of_all, dtype=np.int64)[requests]
            first_tokens -= behind
        if len(positions) != bounds[-1]:
            tokens = np.repeat(first_tokens, lengths) + positions

        def to_device(array: np.ndarray) -> torch.Tensor:
            return async_tensor_h2d(array, device=device)

        of_requests = to_device(np.stack((requests, slots, lengths, first_rows, first_tokens)))
        return cls(
            canvas_length=canvas_length,
            requests_np=requests,
            slots_np=slots,
            lengths_np=lengths,
            requests=of_requests[0],
            slots=of_requests[1],
            lengths=of_requests[2],
            first_rows=of_requests[3],
            first_tokens=of_requests[4],
            request_index=slice_if_consecutive(requests, of_requests[0]),
            slot_index=slice_if_consecutive(slots, of_requests[1]),
            cells=None if cells is None else to_device(cells),
            tokens=None if tokens is None else to_device(tokens),
            behind=None if behind is None else to_device(behind),
        )

    @classmethod
    def of_whole_canvases(cls, slots: torch.Tensor, canvas_length: int) -> "CanvasBatch":
        """Builds the batch of a step that has n whole canvases and no other rows. Only the device
        knows their slots [n] int64, so `slots_np` is empty."""
        n = len(slots)
        requests = torch.arange(n, device=slots.device)
        first_rows = requests * canvas_length
        return cls(
            canvas_length=canvas_length,
            requests_np=np.arange(n),
            slots_np=np.zeros(0, dtype=np.int64),
            lengths_np=np.full(n, canvas_length),
            requests=requests,
            slots=slots,
            lengths=torch.full_like(slots, canvas_length),
            first_rows=first_rows,
            first_tokens=first_rows,
            request_index=slice(0, n),
            slot_index=slots,
            cells=None,
            tokens=None,
        )

    @property
    def num_canvases(self) -> int:
        return len(self.requests_np)

    @cached_property
    def slots_list(self) -> list[int]:
        """Returns `slots_np` as a list."""
        return self.slots_np.tolist()

    def any_in(self, slots: Set[int]) -> bool:
        """Returns whether any canvas' slot is one of `slots`."""
        return not slots.isdisjoint(self.slots_list)

    def canvases_in(self, slots: Container[int]) -> list[int]:
        """Returns the indices of canvases whose slots are in `slots`."""
        return [i for i, slot in enumerate(self.slots_list) if slot in slots]

    @property
    def num_rows(self) -> int:
        """Returns how many rows all canvases have."""
        return int(self.lengths_np.sum())

    @property
    def lengths_with_copies(self) -> torch.Tensor:
        """Returns [n] int64: how many rows each canvas has, with the rows behind it."""
        return self.lengths if self.behind is None else self.lengths + self.behind

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """Returns [n, C] bool: positions that are part of their canvas. Returns None if all are."""
        if self.cells is None:
            return None
        positions = torch.arange(self.canvas_length, device=self.lengths.device)
        return positions < self.lengths[:, None]

    def rows_of(self, i: int) -> slice:
        """Returns the slice of the rows of canvas i."""
        end = int(self.row_ends_np[i])
        return slice(end - int(self.lengths_np[i]), end)

    @cached_property
    def row_ends_np(self) -> np.ndarray:
        """Returns [n] int64: the end of each canvas' rows."""
        return np.cumsum(self.lengths_np)

    def expand_to_rows(self, per_request: torch.Tensor) -> torch.Tensor:
        """Returns each request's value for each of its rows: [n, ...] -> [rows, ...]."""
        if self.cells is None:
            shape = (self.num_canvases, self.canvas_length, *per_request.shape[1:])
            return per_request[:, None].expand(shape).flatten(0, 1)
        return per_request[self.cells // self.canvas_length]

    def flatten(self, grid: torch.Tensor) -> torch.Tensor:
        """Returns the values at rows, without positions that are not part of their canvas: [n, C,
        ...] -> [rows, ...]."""
        flat = grid.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]

    def unflatten(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the values of rows by canvas and position: [rows, ...] -> [n, C, ...]. Positions
        that are not part of their canvas are 0. May be a view of `rows`."""
        if self.cells is not None:
            size = self.num_canvases * self.canvas_length
            rows = rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, self.cells, rows)
        return rows.view(self.num_canvases, self.canvas_length, *rows.shape[1:])
