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
    """What is counted of a request's blocks between steps."""

    began_s: float = 0.0  # of the canvas that the request is at; monotonic clock
    accepted: int = 0  # positions, summed over its steps
    num_finished: int = 0


class SystemIds:
    """OpenTelemetry's generator of ids, by the operating system's random numbers."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class BlockSpans:
    """Makes the spans, in the engine of a server that traces: vLLM has set up OpenTelemetry."""

    def __init__(self) -> None:
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
        began_s: float,  # monotonic clock, when the step was scheduled
    ) -> None:
        """Counts a denoise step of `request`, and makes the span of its block if the step finished
        it. Called before the step's output is made."""
        blocks = self._blocks.setdefault(request, _Blocks())
        if row.step == 1:
            blocks.began_s, blocks.accepted = began_s, 0
        blocks.accepted += row.accepted
        if row.cause is None:
            return
        start_ns = int((time.time() - time.monotonic() + blocks.began_s) * 1e9)
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
        """Returns the trace context of the span around the request's blocks: the client's, or one
        that begins a trace. vLLM sends trace headers back with each output, and its own span of the
        request follows them."""
        headers = dict(request.trace_headers or {})
        if "traceparent" not in headers:
            root = self._tracer.start_span(ROOT, start_time=start_ns)
            root.end()
            self._propagator.inject(headers, self._trace.set_span_in_context(root))
            request.trace_headers = headers
        return extract_trace_context(headers)
