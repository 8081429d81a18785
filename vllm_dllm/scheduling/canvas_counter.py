"""Counts canvases for the metrics from each step's output, and adds the counts to vLLM's statistics
of the step."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.tracing import extract_trace_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dllm.compat.metrics import CanvasSpecDecodingStats
from vllm_dllm.compat.runner import get_canvas_numbers
from vllm_dllm.compat.scheduler import SchedulerHooks, scheduled_at
from vllm_dllm.compat.usage import count_denoise_step
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers, CanvasRow
from vllm_dllm.metrics.prometheus import CanvasCounts
from vllm_dllm.scheduling.families import CanvasFamily

NAME = "diffusion_block"
ROOT = "diffusion_request"
PREFIX = "vllm_dllm."


@dataclass
class _Blocks:
    """The counts of a request's blocks that are kept between steps."""

    accepted: int = 0  # positions accepted in the current canvas, summed over its steps
    num_finished: int = 0  # blocks


class SystemIds:
    """Generates OpenTelemetry's ids from the operating system's random numbers."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class BlockSpans:
    """Makes a span of OpenTelemetry for each finished block, in the engine of a server for which
    vLLM has set it up. docs/metrics.md explains them."""

    def __init__(self) -> None:
        """Imports OpenTelemetry, and replaces the tracer's generator of ids."""
        # Not installed everywhere.
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._blocks: WeakKeyDictionary[Request, _Blocks] = WeakKeyDictionary()
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        # The scope of our spans, by which users may filter them.
        tracer: Any = trace.get_tracer("vllm_dllm.scheduling.block_spans")
        self._tracer = tracer
        # A worker in this process seeds Python's numbers, and every start would have the same ids.
        tracer.id_generator = SystemIds()

    def record_step(
        self,
        request: Request,
        row: CanvasRow,
        began_s: float,  # monotonic clock, when the canvas' first step was scheduled
    ) -> None:
        """Counts a denoise step of `request`. If the step finished the block, makes the block's
        span. Called before the step's output is made."""
        blocks = self._blocks.setdefault(request, _Blocks())
        if row.step == 1:
            blocks.accepted = 0
        blocks.accepted += row.accepted
        if row.cause is None:
            return
        start_ns = int((time.time() - time.monotonic() + began_s) * 1e9)
        attributes: dict[str, Any] = {
            f"{PREFIX}block": blocks.num_finished,
            f"{PREFIX}denoise_steps": row.step,
            f"{PREFIX}accepted_positions": blocks.accepted,
            f"{PREFIX}positions": row.length,
            f"{PREFIX}entropy_nats": row.entropy_nats,
            f"{PREFIX}cause": row.cause,
        }
        context = self._parent_context(request, start_ns)
        self._tracer.start_span(NAME, context, attributes=attributes, start_time=start_ns).end()
        blocks.num_finished += 1

    def _parent_context(self, request: Request, start_ns: int) -> Any:
        """Returns the trace context that the request's blocks belong to: the client's, or that of a
        new root span, which is written into `request.trace_headers`. vLLM sends these headers with
        each output, and its own span of the request follows them."""
        headers = dict(request.trace_headers or {})
        if "traceparent" not in headers:
            root = self._tracer.start_span(ROOT, start_time=start_ns)
            root.end()
            self._propagator.inject(headers, self._trace.set_span_in_context(root))
            request.trace_headers = headers
        return extract_trace_context(headers)


class CanvasCounter:
    """Counts forwards, denoise steps, finished canvases and commits since the last report."""

    def __init__(
        self,
        canvas_width: Callable[[Request], int],
        spans: BlockSpans | None = None,
        *,
        joins_canvases: bool,
    ) -> None:
        """`canvas_width`: returns the width of a request's current canvas, in tokens. `spans`: None
        where the server does not trace. `joins_canvases`: whether blocks are prefilled next to
        their successors, not in forwards of their own."""
        self._canvas_width, self._spans = canvas_width, spans
        self._joins_canvases = joins_canvases
        self._counts = CanvasCounts()
        # Monotonic clock, when the first step of each request's current canvas was scheduled.
        self._began_s: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._committed: set[str] = set()  # requests whose block this step committed by itself

    @classmethod
    def of_family(cls, family: CanvasFamily, config: VllmConfig) -> "CanvasCounter":
        """Returns the counter of a server. It makes spans if the server traces."""
        traces = config.observability_config.otlp_traces_endpoint is not None
        joins_canvases = family.joins_canvases and not family.knows_first_token
        spans = BlockSpans() if traces else None
        return cls(family.num_answer_tokens, spans, joins_canvases=joins_canvases)

    def count_request(self, acceptance: str) -> None:
        """Counts a new request by `acceptance`: its rule, or its mode if it verifies drafts."""
        self._counts.requests[acceptance] += 1

    def count_step(
        self,
        scheduled: SchedulerOutput,
        output: ModelRunnerOutput,
        requests: Mapping[str, Request],  # those that are not over
    ) -> None:
        """Counts a step's canvases for the metrics, for each request's `usage` and for its spans.
        Called once a step, before requests are updated: `count_emitted_block` reads which requests'
        blocks this step committed."""
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
                self._count_denoised(row, requests.get(request_id), scheduled_at(scheduled))
            else:
                self._committed.add(request_id)

    def _count_denoised(self, row: CanvasRow, request: Request | None, scheduled_s: float) -> None:
        """Counts a denoise step of one canvas, and the block if the step finished it. `request` is
        None if it is over. `scheduled_s`: monotonic clock, when the step was scheduled."""
        counts = self._counts
        counts.denoise_steps += 1
        counts.accepted_positions += row.accepted
        if request is not None:
            count_denoise_step(request)
            if row.step == 1:
                self._began_s[request] = scheduled_s
            if self._spans is not None:
                self._spans.record_step(request, row, self._began_s[request])
        if row.cause is None:
            return
        counts.canvases_finished[row.cause] += 1
        counts.block_denoise_steps.append(row.step)
        counts.block_entropy_nats.append(row.entropy_nats)
        if request is not None:
            counts.block_seconds.append(time.monotonic() - self._began_s.pop(request))
            counts.canvases_cut += row.length < self._canvas_width(request)

    def count_emitted_block(self, request: Request, *, spares_commit: bool) -> None:
        """Counts how a block of `request` is committed. This is in a forward of its own, in one
        that it shares with the next canvas, or in none if `spares_commit`."""
        spared = "none" if spares_commit else "shared" if self._joins_canvases else "own"
        has_own = request.request_id in self._committed
        self._counts.commits["own" if has_own else spared] += 1

    def pop_counts(self) -> CanvasCounts:
        """Returns what was counted since the last call, and starts counting anew."""
        counts, self._counts = self._counts, CanvasCounts()
        return counts


class CountedScheduling(SchedulerHooks):
    """Mixed into a scheduler, which sets the attributes. Counts canvases if vLLM logs statistics.
    Always counts the commits that were spared, because vLLM's clients compute with them."""

    counter: CanvasCounter | None  # None: vLLM logs no statistics
    spared_commits: list[int]  # widths of canvases, until they are in the statistics

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        stats = spec_decoding_stats or CanvasSpecDecodingStats(self.num_spec_tokens)
        return super().make_spec_decoding_stats(stats, *args, **kwargs)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Adds the counts to vLLM's statistics, and each spared commit as a step: vLLM's clients
        compute the denoise steps as all steps minus one commit per canvas. A last block that was
        committed because its end was not foreseen (`requests/ends.py`) counts as spared, too."""
        if spec_decoding_stats is not None:
            for width in self.spared_commits:
                spec_decoding_stats.observe_draft(width, num_accepted_tokens=0)
        if self.counter is not None and isinstance(spec_decoding_stats, CanvasSpecDecodingStats):
            spec_decoding_stats.canvas_counts = vars(self.counter.pop_counts())
        self.spared_commits.clear()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)
