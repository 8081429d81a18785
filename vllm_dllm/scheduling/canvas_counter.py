"""Counts what the metrics show of canvases, from what each step brings the scheduler."""

import time
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dllm.compat.metrics import denoised
from vllm_dllm.compat.runner import numbers_of
from vllm_dllm.compat.scheduler import scheduled_at
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers, CanvasRow
from vllm_dllm.metrics.prometheus import CanvasCounts
from vllm_dllm.scheduling.block_spans import BlockSpans


class CanvasCounter:
    def __init__(
        self,
        canvas_width: Callable[[Request], int],
        spans: BlockSpans | None = None,
        *,
        joins_canvases: bool,
    ) -> None:
        """`canvas_width`: of the canvas that a request is at, if nothing makes it narrower.
        `spans`: where the server traces.
        `joins_canvases`: a block is prefilled next to its successor, not in a forward of its own.
        """
        self._canvas_width, self._spans = canvas_width, spans
        self._joins_canvases = joins_canvases
        self._counts = CanvasCounts()
        self._began: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._committed: set[str] = set()  # requests whose block this step committed by itself

    def request_received(self, acceptance: str) -> None:
        self._counts.requests[acceptance] += 1

    def count_step(
        self,
        scheduled: SchedulerOutput,
        output: ModelRunnerOutput,
        requests: Mapping[str, Request],  # those that are not over
    ) -> None:
        """Counts what a step has brought, before its requests get it, for the metrics, for the
        `usage` of each request and for its spans. Call it once a step: `block_emitted` reads what
        it found."""
        self._committed.clear()
        if scheduled.total_num_scheduled_tokens == 0:
            return
        self._counts.forwards += 1
        numbers: CanvasNumbers | None = numbers_of(output)
        if numbers is None:
            return
        self._counts.sampling_memory_peak_bytes = numbers.sampling_peak_bytes
        self._counts.sampling_memory_bound_bytes = numbers.sampling_bound_bytes
        for row in numbers.rows():
            request_id = output.req_ids[row.request]
            if row.is_denoised:
                self._denoised(row, requests.get(request_id), scheduled_at(scheduled))
            else:
                self._committed.add(request_id)

    def _denoised(self, row: CanvasRow, request: Request | None, began: float) -> None:
        counts = self._counts
        counts.denoise_steps += 1
        counts.accepted_positions += row.accepted
        if request is not None:
            denoised(request)
            if row.step == 1:
                self._began[request] = began
        if self._spans is not None and request is not None:
            self._spans.denoised(request, row, began)
        if row.cause is None:
            return
        counts.canvases_finished[row.cause] += 1
        counts.block_denoise_steps.append(row.step)
        counts.block_entropy_nats.append(row.entropy_nats)
        if request is not None:
            counts.block_seconds.append(time.monotonic() - self._began.pop(request))
            counts.canvases_cut += row.length < self._canvas_width(request)

    def block_emitted(self, request: Request, *, spares_commit: bool) -> None:
        """`spares_commit`: no forward is needed to commit it."""
        spared = "none" if spares_commit else "shared" if self._joins_canvases else "own"
        has_own = request.request_id in self._committed
        self._counts.commits["own" if has_own else spared] += 1

    def take(self) -> CanvasCounts:
        """What was counted since the last call."""
        counts, self._counts = self._counts, CanvasCounts()
        return counts
