"""Shows the canvases of a step to those who watch, and counts them for the metrics. The trace file
gets all, clients their own.

A step that nobody watches copies and computes nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.config.canvas_feeds import find_socket
from vllm_dllm.config.files import LineFile
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, Settled, StepInputs
from vllm_dllm.step.slots import NewRequest, Registry
from vllm_dllm.step.watched.canvas_sender import CanvasSender, QueuedStep, StepCanvases, Watcher

logger = init_logger(__name__)


class CanvasObservers(Registry):
    """Shows canvases to the trace file, and to clients that watch, by slot. All ranks know which
    canvases are watched, since a step whose canvases are watched runs other kernels. Ranks that ran
    different ones would read wrong sums from each other."""

    def __init__(
        self,
        trace_path: str | None,
        device: torch.device,
        *,
        speaks: bool,  # whether this worker shows canvases: one of a tensor-parallel group does
    ) -> None:
        self.trace = CanvasTrace(trace_path) if trace_path and speaks else None
        self._traces, self._watched = bool(trace_path), set[int]()  # slots
        self._speaks, self._device = speaks, device
        self._watchers: dict[int, Watcher] = {}
        self._sender: CanvasSender | None = None  # started by the first who watches

    def add_request(self, request: NewRequest) -> None:
        """Keeps where the request's canvases are sent, if its client watches."""
        feed = request.options.canvas_feed
        if feed is None:
            return
        self._watched.add(request.slot)
        if not self._speaks or (found := find_socket(feed)) is None:
            return
        self._watchers[request.slot] = Watcher(*found)
        self._sender = self._sender or CanvasSender()

    def remove_request(self, slot: int) -> None:
        """Queues the end of the slot's stream of canvases, if its client watches."""
        self._watched.discard(slot)
        watcher = self._watchers.pop(slot, None)
        if watcher is not None and self._sender is not None:
            self._sender.send_end(watcher)

    def are_watching(self, batch: CanvasBatch) -> bool:
        """Returns whether anybody watches this step's canvases, the same on all ranks."""
        return self._traces or (bool(self._watched) and batch.any_in(self._watched))

    def show_step(self, canvases: StepCanvases, batch: CanvasBatch, request_ids: list[str]) -> None:
        """Writes a step's canvases to the trace, and queues those of watched requests. Waits for
        the device only if there is a trace. `request_ids`: those of the whole batch."""
        if self.trace is not None:
            host, wait = canvases.copy_to_host()
            wait()
            self.trace.write_step(host, [request_ids[i] for i in batch.requests_np])
        watched = batch.canvases_in(self._watchers)
        if self._sender is None or not watched:
            return
        index = async_tensor_h2d(np.array(watched, dtype=np.int64), device=self._device)
        self._sender.send_step(
            QueuedStep(
                *canvases.select(index).copy_to_host(),
                [self._watchers[batch.slots_list[i]] for i in watched],
            )
        )


class CanvasTrace:
    """Appends canvases to a file, for people to watch: one JSON line for each request and step.

    It can be read while it grows: a line is written at once. Lines that the disk does not take are
    dropped.

    Each line holds `request_id`, `step` (1-based), `tokens` (best guess, one a canvas position),
    `accepted` (0/1 a position), `canvas` (what its next step reads), `entropy` (mean, nats) and
    `finished`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = LineFile(Path(path))
        self._has_warned = False

    def write_step(
        self,
        canvases: StepCanvases,  # on the host
        request_ids: list[str],  # of each canvas
    ) -> None:
        """Appends a line for each canvas that the step denoised."""
        lengths = canvases.length.tolist()
        for i, (request_id, length) in enumerate(zip(request_ids, lengths, strict=True)):
            if not canvases.denoises[i]:
                continue
            nats = canvases.entropy_nats[i, :length].tolist()
            self._append_line(
                {
                    "request_id": request_id,
                    "step": int(canvases.step[i]),
                    "tokens": canvases.tokens[i, :length].tolist(),
                    "accepted": canvases.accepted[i, :length].int().tolist(),
                    "canvas": canvases.next_canvas[i, :length].tolist(),
                    "entropy": sum(nats) / length,
                    "finished": bool(canvases.finished[i]),
                }
            )

    def _append_line(self, line: dict[str, Any]) -> None:
        """Appends a line of JSON. If the disk does not take it, drops it, and logs a warning the
        first time."""
        try:
            self._file.append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "A line of the trace was dropped, and more may follow: cannot write to %s: %s.",
                    self._path,
                    error.strerror,
                )


def count_canvases(
    inputs: StepInputs, denoised: Denoised, settled: Settled, cut: Sequence[int]
) -> CanvasNumbers:
    """Returns the numbers of a step's canvases for the metrics, still being copied to the host.
    `cut`: as in `CanvasNumbers`."""
    batch, outcome, denoises = inputs.batch, denoised.outcome, settled.denoises
    accepted, entropy_nats = outcome.accepted, denoised.stats.entropy_nats
    if batch.valid is not None:
        accepted, entropy_nats = accepted & batch.valid, entropy_nats * batch.valid
    flags = {"denoises": denoises, "finished": outcome.finished}
    if outcome.converged is not None:
        flags["converged"] = outcome.converged
    if outcome.revealed is not None:
        flags["revealed"] = outcome.revealed
    if denoised.is_committed is not None:
        flags["committed"] = denoised.is_committed & denoises
    if inputs.drafts is not None:
        flags["verified"] = inputs.drafts.verified_now
    # Written in place, because on small batches each operation costs the same.
    values = entropy_nats.new_empty(3 + len(flags), len(denoises), dtype=torch.float32)
    values[0] = outcome.state.steps_done
    torch.sum(accepted, dim=-1, dtype=torch.float32, out=values[1])
    torch.sum(entropy_nats, dim=-1, out=values[2])
    values[3:] = torch.stack(tuple(flags.values()))
    found = copy_numbers_to_host(batch, ("step", "accepted", "entropy", *flags), values)
    return found._replace(cut=cut)


def copy_numbers_to_host(
    batch: CanvasBatch, names: tuple[str, ...], values: torch.Tensor
) -> CanvasNumbers:
    """Starts copying a step's numbers `values` [names, n] fp32 to the host, and returns them. Read
    them only after the step's tokens have arrived. `names`: the rows of `values`, in order."""
    return CanvasNumbers(
        batch.requests_np.tolist(),
        batch.lengths_np.tolist(),
        names,
        values.to("cpu", non_blocking=True).numpy(),
    )
