"""`vllm bench serve` against the server: its diffusion metrics are what the server did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import CANVAS, CHECKPOINT, Server

QUESTIONS = ("Reverse: rose chair lamp", "Sort: q d x a", "Count from 31 to 69.")


def test_diffusion_metrics(server: Server, tmp_path: Path) -> None:
    """At batch 1, next to the trace, in which each line is one denoising step of one request."""
    before = len(server.trace.read_text()) if server.trace.exists() else 0
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai"),
        *("--base-url", f"http://127.0.0.1:{server.port}"),
        *("--model", server.model, "--tokenizer", str(CHECKPOINT)),
        *("--dataset-name", "custom", "--dataset-path", str(data)),
        *("--custom-output-len", "128", "--num-prompts", str(len(QUESTIONS))),
        *("--max-concurrency", "1", "--save-result", "--result-dir", str(tmp_path)),
        # A first request of its own would be in the trace and not in the metrics.
        *("--ready-check-timeout-sec", "0", "--result-filename", "bench.json"),
    ]
    subprocess.run(command, check=True)
    reported = json.loads((tmp_path / "bench.json").read_text())

    lines = [json.loads(line) for line in server.trace.read_text()[before:].splitlines()]
    committed = CANVAS * sum(line["finished"] for line in lines)
    assert reported["completed"] == len(QUESTIONS) <= committed // CANVAS
    assert reported["diffusion_denoising_steps"] == len(lines)
    assert reported["diffusion_committed_tokens"] == committed
    assert reported["diffusion_steps_per_canvas"] == pytest.approx(len(lines) * CANVAS / committed)
    assert reported["diffusion_committed_per_step"] == pytest.approx(committed / len(lines))
