"""`vllm bench serve` against the server: its diffusion metrics are what the server did."""

from pathlib import Path

from bench import serve_metrics
from tests.e2e.conftest import CANVAS, CHECKPOINT, Server


def test_diffusion_metrics(server: Server, tmp_path: Path) -> None:
    before = len(server.trace.read_text()) if server.trace.exists() else 0
    questions = ["Reverse: rose chair lamp", "Sort: q d x a", "Count from 31 to 69."]
    reported = serve_metrics.run_vllm_bench(
        f"http://127.0.0.1:{server.port}", server.model, CHECKPOINT, questions, tmp_path
    )
    assert reported["completed"] == len(questions)
    trace = server.trace.read_text()[before:]
    assert serve_metrics.differences(reported, serve_metrics.counted(trace, CANVAS)) == []
