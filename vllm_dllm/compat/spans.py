"""Spans of OpenTelemetry inside of vLLM's span of a request.

The engine knows what happened and when; the API process has the tracer, and makes a request's span
when the request ends. What the engine tells travels with the request's trace headers, which vLLM
sends back with each output.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.request import Request

_HEADER = "vllm_dllm-spans"


class Span(NamedTuple):
    name: str
    start_ns: int  # since the epoch, as all times of spans
    end_ns: int
    attributes: Mapping[str, Any]


def endpoint_of(config: VllmConfig) -> str | None:
    """Where `--otlp-traces-endpoint` sends spans; None: there are none."""
    return config.observability_config.otlp_traces_endpoint


def send(request: Request, spans: Sequence[Span]) -> None:
    """With the next output of `request`, from a scheduler. They replace those sent before."""
    request.trace_headers = {**(request.trace_headers or {}), _HEADER: json.dumps(spans)}


def receive() -> None:
    """In the process that makes the spans of requests. Repeatable."""
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from vllm.tracing import otel
    from vllm.v1.engine import output_processor

    if output_processor.extract_trace_context.__module__ == __name__:
        return
    stock_extract = output_processor.extract_trace_context
    stock_make = output_processor.instrument_manual
    key = contexts.create_key(_HEADER)

    def extract_trace_context(headers: Mapping[str, str] | None) -> Any:
        if headers is None or _HEADER not in headers:
            return stock_extract(headers)
        own = {name: value for name, value in headers.items() if name != _HEADER}
        outside = stock_extract(own) or otel._get_smart_context()
        return contexts.set_value(key, headers[_HEADER], outside)

    def instrument_manual(
        span_name: str,
        start_time: int,
        end_time: int | None = None,
        attributes: dict[str, Any] | None = None,
        context: Any = None,
        kind: Any = None,
    ) -> None:
        sent = None if context is None else contexts.get_value(key, context)
        if sent is None:
            stock_make(span_name, start_time, end_time, attributes, context, kind)
            return
        tracer = trace.get_tracer(__name__)
        around = tracer.start_span(span_name, context, kind, attributes, start_time=start_time)
        inside = trace.set_span_in_context(around, context)
        for span in (Span(*fields) for fields in json.loads(str(sent))):
            tracer.start_span(
                span.name, inside, attributes=span.attributes, start_time=span.start_ns
            ).end(span.end_ns)
        around.end(end_time)

    output_processor.extract_trace_context = extract_trace_context
    output_processor.instrument_manual = instrument_manual
