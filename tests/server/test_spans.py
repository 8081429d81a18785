"""Spans of a server's blocks reach a collector. One that hangs, or is gone, holds up no answer."""

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.collector import SpanRecord, check_blocks, collecting
from tests.server.conftest import CHECKPOINT, UNCOMPILED, Server, serving

TRACEPARENT = f"00-{'12' * 16}-{'34' * 8}-01"
pytestmark = pytest.mark.thorough


def ask(server: Server, max_tokens: int = 128) -> dict[str, Any]:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Count from 31 to 69."}],
        "max_tokens": max_tokens,
        "seed": 1,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "traceparent": TRACEPARENT},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_spans_of_a_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        options = (*UNCOMPILED, "--otlp-traces-endpoint", collector.url)
        with serving(CHECKPOINT, tmp_path, *options, env=collector.environment) as server:
            answer = ask(server)
            collector.wait_for("llm_request", 1)
            trace = [json.loads(line) for line in server.trace.read_text().splitlines()]
            # They come from another process.
            num_blocks = sum(line["finished"] for line in trace)
            check(collector.wait_for("diffusion_block", num_blocks), trace)
            collector.answers.clear()  # it hangs
            for _ in range(3):
                assert ask(server)["choices"] == answer["choices"]
            stack.close()  # it is gone
            for _ in range(3):
                assert ask(server)["choices"] == answer["choices"]


def check(found: list[SpanRecord], trace: list[dict[str, Any]]) -> None:
    (request,) = (span for span in found if span.name == "llm_request")
    assert (request.trace_id, request.parent) == ("12" * 16, "34" * 8)
    blocks = [span for span in found if span.name == "diffusion_block"]
    assert {span.parent for span in blocks} == {"34" * 8}
    check_blocks(trace, blocks)
