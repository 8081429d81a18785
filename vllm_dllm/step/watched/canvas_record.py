"""What a step shows of its canvases, on the device and on the host. The trace file and the live
streams are made of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class StepCanvases(NamedTuple):
    """What a step did to n canvases, on the device or on the host."""

    tokens: torch.Tensor  # [n, C] int64, best guesses
    accepted: torch.Tensor  # [n, C] bool
    next_canvas: torch.Tensor  # [n, C] int64, what the next step reads
    entropy_nats: torch.Tensor  # [n, C]
    step: torch.Tensor  # [n] int64, 1-based
    temperature: torch.Tensor  # [n]
    start: torch.Tensor  # [n] int64, absolute position of the first token
    denoises: torch.Tensor  # [n] bool, the others have nothing to show
    finished: torch.Tensor  # [n] bool

    def select(self, index: torch.Tensor) -> "StepCanvases":
        """Returns copies of the canvases `index` [k] int64, which later steps do not change."""
        return StepCanvases(*(column.index_select(0, index) for column in self))

    def copy_to_host(self) -> tuple["StepCanvases", Callable[[], None]]:
        """Starts copying to the host. Returns the copies, and a function that waits until they are
        complete: call it before reading them. Copies nothing on a CPU."""
        device = self.tokens.device
        if device.type == "cpu":
            return self, lambda: None
        copies = StepCanvases(*(column.to("cpu", non_blocking=True) for column in self))
        # Sleeps instead of polling the driver, which the thread that launches kernels needs.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return copies, event.synchronize


@dataclass(frozen=True)
class CanvasRecord:
    """One denoise step of one canvas; lists have one entry per canvas position."""

    step: int  # from 1
    tokens: list[int]  # best guesses
    accepted: list[int]  # 0 or 1
    next_canvas: list[int]  # tokens that the next step reads
    entropy_nats: list[float]
    temperature: float
    start: int  # absolute position of the first token
    finished: bool

    @property
    def mean_entropy(self) -> float:
        """Returns the mean entropy of the canvas' positions, in nats."""
        return sum(self.entropy_nats) / len(self.entropy_nats)


def read_records(canvases: StepCanvases, lengths: list[int]) -> list[CanvasRecord | None]:
    """Returns a record of each canvas, from tensors that are on the host; None for canvases that
    the step did not denoise. `lengths`: positions of each canvas."""
    columns = [column.int().tolist() for column in canvases[:3]]
    entropy = canvases.entropy_nats.tolist()
    step, temperature, start = (column.tolist() for column in canvases[4:7])
    finished = canvases.finished.tolist()
    records: list[CanvasRecord | None] = []
    for i, denoises in enumerate(canvases.denoises.tolist()):
        if not denoises:
            records.append(None)
            continue
        tokens, accepted, next_canvas = (column[i][: lengths[i]] for column in columns)
        records.append(
            CanvasRecord(
                *(step[i], tokens, accepted, next_canvas, entropy[i][: lengths[i]]),
                *(temperature[i], start[i], finished[i]),
            )
        )
    return records
