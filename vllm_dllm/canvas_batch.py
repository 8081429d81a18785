"""The canvases of one scheduler step: which requests have one, and where its rows lie.

Built from the runner's host-side metadata once a step, and kept while the next step has the same
canvases, as most have; a request whose prefill goes on has none.
The device tensors are copied over asynchronously, so building it never waits for the device.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass(frozen=True)
class CanvasBatch:
    """n requests with a canvas; `rows` = their canvas positions, one after the other.

    A canvas is shorter than C when the request asked for that or `max_model_len` cuts it off; it
    then simply has fewer rows, and no phantom ones.
    """

    made_of: bytes  # all that `build` reads of a step
    canvas_length: int  # C
    requests_np: np.ndarray  # [n] int64, indices in the batch
    slots_np: np.ndarray  # [n] int64, slots of those requests
    lengths_np: np.ndarray  # [n] int64, canvas positions of each request, 1..C
    requests: torch.Tensor  # [n] int64
    slots: torch.Tensor  # [n] int64
    lengths: torch.Tensor  # [n] int64
    slot_index: slice | torch.Tensor  # `slots`; a slice, which copies nothing, if they are in order
    cells: torch.Tensor | None  # [rows] int64, row -> request * C + position; None: all are full
    tokens: torch.Tensor | None  # [rows] int64, row -> token of the batch; None: rows = tokens

    @classmethod
    def build(
        cls,
        input_batch: InputBatch,
        canvas_length: int,
        device: torch.device,
        previous: "CanvasBatch | None" = None,
    ) -> "CanvasBatch":
        """`previous`: of the step before, returned as it is if this step has the same canvases."""
        num_reqs = input_batch.num_reqs
        made_of = b"".join(
            array.tobytes()
            for array in (
                input_batch.cu_num_logits_np[: num_reqs + 1],
                input_batch.idx_mapping_np[:num_reqs],
                input_batch.query_start_loc_np[: num_reqs + 1],
            )
        )
        if previous is not None and previous.made_of == made_of:
            return previous
        num_logits = np.diff(input_batch.cu_num_logits_np[: num_reqs + 1])
        requests = np.flatnonzero(num_logits > 0)
        lengths = num_logits[requests].astype(np.int64)
        slots = input_batch.idx_mapping_np[requests].astype(np.int64)

        # Position inside its canvas of every row, counted up from each canvas' first row.
        first_rows = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first_rows, lengths)
        cells = tokens = None
        if (lengths != canvas_length).any():
            cells = np.repeat(np.arange(len(requests)) * canvas_length, lengths) + positions
        if len(positions) != input_batch.num_tokens:
            # A canvas is the end of its request's rows; what remains of the prompt may precede it.
            first_tokens = input_batch.query_start_loc_np[requests + 1] - lengths
            tokens = np.repeat(first_tokens, lengths) + positions

        def to_device(array: np.ndarray) -> torch.Tensor:
            return async_tensor_h2d(array.astype(np.int64), device=device)

        of_requests = to_device(np.stack((requests, slots, lengths)))
        slot_index = of_requests[1]
        if (np.diff(slots) == 1).all():
            slot_index = slice(int(slots[0]), int(slots[-1]) + 1)
        return cls(
            made_of=made_of,
            canvas_length=canvas_length,
            requests_np=requests,
            slots_np=slots,
            lengths_np=lengths,
            requests=of_requests[0],
            slots=of_requests[1],
            lengths=of_requests[2],
            slot_index=slot_index,
            cells=None if cells is None else to_device(cells),
            tokens=None if tokens is None else to_device(tokens),
        )

    @property
    def num_canvases(self) -> int:
        return len(self.requests_np)

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """[n, C] bool: positions that are part of their canvas. None: all are."""
        if self.cells is None:
            return None
        positions = torch.arange(self.canvas_length, device=self.lengths.device)
        return positions < self.lengths[:, None]

    def by_row(self, per_request: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [rows, ...]: each request's value at each of its rows."""
        if self.cells is None:
            return per_request.repeat_interleave(self.canvas_length, dim=0)
        return per_request[self.cells // self.canvas_length]

    def flatten(self, grid: torch.Tensor) -> torch.Tensor:
        """[n, C, ...] -> [rows, ...]."""
        flat = grid.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]

    def unflatten(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [n, C, ...], zero at positions that are not part of their canvas."""
        if self.cells is not None:
            size = self.num_canvases * self.canvas_length
            rows = rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, self.cells, rows)
        return rows.view(self.num_canvases, self.canvas_length, *rows.shape[1:])
