"""A collector of OpenTelemetry's spans on 127.0.0.1, by OTLP over HTTP."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests import tolerances
from tests.processes import HANGS_S


@dataclass(frozen=True)
class SpanRecord:
    name: str
    trace_id: str  # hex
    span_id: str
    parent: str  # "": none
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


@dataclass
class Collector:
    url: str
    spans: list[SpanRecord] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    answers: threading.Event = field(default_factory=threading.Event)
    """Whoever sends waits while this is not set."""

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that sends its spans here, at once."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "50",  # ms
        }

    def wait_for(self, name: str, count: int, since: int = 0) -> list[SpanRecord]:
        """All that came after the first `since`, once so many of this name are among them."""

        def have() -> bool:
            return sum(span.name == name for span in self.spans[since:]) >= count

        with self.arrived:
            assert self.arrived.wait_for(have, HANGS_S), [span.name for span in self.spans]
            return self.spans[since:]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            message = ExportTraceServiceRequest.FromString(body)
            with found.arrived:
                found.spans += _spans(message)
                found.arrived.notify_all()
            found.answers.wait(HANGS_S)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    found.answers.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(message: ExportTraceServiceRequest) -> list[SpanRecord]:
    return [
        SpanRecord(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def check_blocks(steps: Sequence[Mapping[str, Any]], blocks: Sequence[SpanRecord]) -> None:
    """`blocks` of one request, in order, against the lines of the trace of its steps."""
    of_block: list[list[Mapping[str, Any]]] = [[]]
    for step in steps:
        of_block[-1].append(step)
        if step["finished"]:
            of_block.append([])
    assert of_block.pop() == [] and len(of_block) == len(blocks)
    for i, (lines, block) in enumerate(zip(of_block, blocks, strict=True)):
        found = {name.removeprefix("vllm_dllm."): v for name, v in block.attributes.items()}
        assert found["block"] == i
        assert found["denoise_steps"] == len(lines)
        assert found["accepted_positions"] == sum(sum(line["accepted"]) for line in lines)
        assert found["positions"] == len(lines[-1]["canvas"])
        entropy = pytest.approx(lines[-1]["entropy"], rel=tolerances.total(256))
        assert found["entropy_nats"] == entropy
        assert found["cause"] in ("converged", "revealed", "step_cap")
        assert block.start_ns < block.end_ns
