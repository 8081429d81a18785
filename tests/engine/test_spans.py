"""OpenTelemetry: the spans of a request's blocks say what the trace of its steps says."""

import itertools
import time
from collections.abc import Iterator

import pytest
from vllm import SamplingParams

from tests.collector import Collector, SpanRecord, check_blocks, collecting
from tests.engine.conftest import GetEngine, GetTiny
from tests.engine.one_step import FEW_STEPS, random_ids

CANVAS = 32


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Of all spans of this process, until the end of the module."""
    from opentelemetry import trace

    with pytest.MonkeyPatch.context() as patch, collecting() as found:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")  # vLLM sets it for good
        yield found
        trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]


def blocks_of(request: SpanRecord, found: list[SpanRecord]) -> list[SpanRecord]:
    return [s for s in found if s.name == "diffusion_block" and s.trace_id == request.trace_id]


def test_blocks_of_requests(engine: GetEngine, tiny: GetTiny, collector: Collector) -> None:
    served = engine(tiny(64), disable_log_stats=False, otlp_traces_endpoint=collector.url)
    params = SamplingParams(max_tokens=3 * CANVAS, ignore_eos=True, extra_args=FEW_STEPS)
    prompts = [random_ids(n, 512, seed=n) for n in (40, 7)]
    began = time.time_ns()
    outputs = served.ask(prompts, params)
    found = collector.wait_for("llm_request", len(outputs))
    requests = [span for span in found if span.name == "llm_request"]
    assert sorted(r.attributes["gen_ai.request.id"] for r in requests) == sorted(
        output.request_id for output in outputs
    )
    for request in requests:
        blocks = blocks_of(request, found)
        assert len(blocks) == 3
        steps = served.steps(str(request.attributes["gen_ai.request.id"]))
        check_blocks(steps, blocks)
        (root,) = (s for s in found if s.span_id == request.parent)
        assert (root.name, root.parent) == ("diffusion_request", "")
        assert {block.parent for block in blocks} == {root.span_id}
        assert began <= request.start_ns <= blocks[0].start_ns
        assert blocks[-1].end_ns <= request.end_ns <= time.time_ns()
        assert all(a.end_ns <= b.end_ns for a, b in itertools.pairwise(blocks))


def test_of_a_clients_trace(engine: GetEngine, tiny: GetTiny, collector: Collector) -> None:
    served = engine(tiny(64), disable_log_stats=False, otlp_traces_endpoint=collector.url)
    core, before = served.llm.llm_engine, len(collector.spans)
    core.add_request(
        "traced",
        {"prompt_token_ids": random_ids(9, 512, seed=9)},
        SamplingParams(max_tokens=CANVAS, ignore_eos=True, extra_args=FEW_STEPS),
        trace_headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
    )
    while core.has_unfinished_requests():
        core.step()
    found = collector.wait_for("llm_request", 1, since=before)
    (request,) = (span for span in found if span.name == "llm_request")
    assert (request.trace_id, request.parent) == ("ab" * 16, "cd" * 8)
    (block,) = blocks_of(request, found)
    assert block.parent == "cd" * 8
    collector.answers.clear()  # it hangs, and holds up no answer
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True, extra_args=FEW_STEPS)
    (output,) = served.ask([[5, 6]], params)
    assert len(output.outputs[0].token_ids) == CANVAS
    collector.answers.set()


def test_without_tracing(engine: GetEngine, tiny: GetTiny) -> None:
    served = engine(tiny(64), disable_log_stats=False)
    scheduler = served.scheduler
    assert scheduler.counter._spans is None
    core = served.llm.llm_engine
    params = SamplingParams(max_tokens=CANVAS, ignore_eos=True, extra_args=FEW_STEPS)
    core.add_request("untraced", {"prompt_token_ids": [5, 6, 7]}, params)
    core.step()
    (request,) = scheduler.requests.values()
    assert request.trace_headers is None
    while core.has_unfinished_requests():
        core.step()
