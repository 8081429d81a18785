"""A span of OpenTelemetry for each finished canvas of a request. docs/metrics.md explains them."""

import secrets
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.tracing import extract_trace_context
from vllm.v1.request import Request

from vllm_dllm.metrics.canvas_numbers import CanvasRow

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
    """Makes a span for each finished block, in the engine of a server for which vLLM has set up
    OpenTelemetry."""

    def __init__(self) -> None:
        """Imports OpenTelemetry, and replaces the tracer's generator of ids."""
        # Not installed everywhere.
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._blocks: WeakKeyDictionary[Request, _Blocks] = WeakKeyDictionary()
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        tracer: Any = trace.get_tracer(__name__)
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
