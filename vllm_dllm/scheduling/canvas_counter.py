"""Counts what the metrics show of canvases, from what each step brings the scheduler, and adds it
to vLLM's statistics of the step."""

import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat.metrics import CanvasSpecDecodingStats, count_denoise_step
from vllm_dllm.compat.runner import get_canvas_numbers
from vllm_dllm.compat.scheduler import SchedulerHooks, scheduled_at
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers, CanvasRow
from vllm_dllm.metrics.prometheus import CanvasCounts
from vllm_dllm.scheduling.block_spans import BlockSpans
from vllm_dllm.scheduling.families import CanvasFamily


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
        numbers: CanvasNumbers | None = get_canvas_numbers(output)
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
        """Counts a denoise step of one canvas, and the block if the step finished it."""
        counts = self._counts
        counts.denoise_steps += 1
        counts.accepted_positions += row.accepted
        if request is not None:
            count_denoise_step(request)
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


class CountedScheduling(SchedulerHooks):
    """Added to a scheduler. Counts canvases where vLLM counts anything, and commits that were not
    run in any case, because vLLM's clients compute with them."""

    counter: CanvasCounter | None = None
    spared_commits: list[int]  # widths, until they are in the statistics

    def count_for(self, family: CanvasFamily) -> None:
        self.spared_commits = []
        if not self.log_stats:
            return
        traces = self.vllm_config.observability_config.otlp_traces_endpoint is not None
        self.counter = CanvasCounter(
            family.width,
            BlockSpans() if traces else None,
            joins_canvases=family.joins_canvases and not family.is_seeded,
        )

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        stats = spec_decoding_stats or CanvasSpecDecodingStats(self.num_spec_tokens)
        return super().make_spec_decoding_stats(stats, *args, **kwargs)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Counts a saved commit as a step, because vLLM's clients compute the denoise steps as all
        steps minus one commit per canvas. This includes a last block that was committed because
        its end was not foreseen (`requests/ends.py`)."""
        if spec_decoding_stats is not None:
            for width in self.spared_commits:
                spec_decoding_stats.observe_draft(width, num_accepted_tokens=0)
        if self.counter is not None and isinstance(spec_decoding_stats, CanvasSpecDecodingStats):
            spec_decoding_stats.canvas_counts = vars(self.counter.take())
        self.spared_commits.clear()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)
