"""Checks the diffusion metrics of `vllm bench serve` against the server's own record of each step.

    python -m bench.serve_metrics

Starts `vllm serve` with a canvas trace (a JSON line for each request and denoising step), runs
`vllm bench serve` against it at batch 1, and compares.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import harness

VLLM = str(Path(sys.executable).with_name("vllm"))
MAX_TOKENS = 128
NAME = "bench"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(url: str, server: subprocess.Popen, log: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError("the server did not start:\n" + log.read_text()[-2000:])


def counted(trace: str, canvas_length: int) -> dict[str, float]:
    """What the trace says: each line is one denoising step of one request."""
    lines = [json.loads(line) for line in trace.splitlines()]
    blocks = sum(line["finished"] for line in lines)
    return {
        "diffusion_denoising_steps": len(lines),
        "diffusion_committed_tokens": blocks * canvas_length,
        "diffusion_steps_per_canvas": len(lines) / blocks,
        "diffusion_committed_per_step": blocks * canvas_length / len(lines),
    }


def differences(reported: dict[str, Any], trace: dict[str, float]) -> list[str]:
    """One line for each metric that differs from the trace."""
    return [
        f"{name}: vllm bench serve says {reported.get(name)}, the trace {value}"
        for name, value in trace.items()
        if name not in reported or abs(reported[name] - value) > 1e-6 * max(1.0, value)
    ]


def run_vllm_bench(
    url: str, model: str, checkpoint: Path, questions: list[str], folder: Path
) -> dict[str, Any]:
    """The result file of `vllm bench serve` at batch 1; `folder` takes its files."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    command = [
        *(VLLM, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", model, "--tokenizer", str(checkpoint)),
        *("--dataset-name", "custom", "--dataset-path", str(data)),
        *("--custom-output-len", str(MAX_TOKENS), "--num-prompts", str(len(questions))),
        *("--max-concurrency", "1", "--save-result", "--result-dir", str(folder)),
        # A first request of its own would be in the trace and not in the metrics.
        *("--ready-check-timeout-sec", "0"),
        *("--result-filename", "bench.json"),
    ]
    subprocess.run(command, check=True)
    return json.loads((folder / "bench.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/diffusiongemma-tiny"))
    parser.add_argument("--held-out", type=Path, default=Path("checkpoints/held_out.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=28)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--out", type=Path, default=Path(f"bench/results/cpu-{cores}core"))
    args = parser.parse_args()

    machine = harness.machine()
    canvas_length = json.loads((args.checkpoint / "config.json").read_text())["canvas_length"]
    rows = [json.loads(line) for line in args.held_out.read_text().splitlines()]
    rows = rows[:: len(rows) // args.num_prompts][: args.num_prompts]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace, log = folder / "trace.jsonl", folder / "server.log"
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        serve = [
            *(VLLM, "serve", str(args.checkpoint), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", "1024", "--kv-cache-memory-bytes", "1G", "--enforce-eager"),
            *("--diffusion-config", json.dumps({"canvas_length": canvas_length})),
            *("--additional-config", json.dumps({"vllm_dllm": {"trace_path": str(trace)}})),
        ]
        with log.open("w") as stream:
            server = subprocess.Popen(serve, stdout=stream, stderr=stream)
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        wait_until_ready(url, server, log)
        questions = [row["messages"][-1]["content"] for row in rows]
        reported = run_vllm_bench(url, NAME, args.checkpoint, questions, folder)
        trace_says = counted(trace.read_text(), canvas_length)

    wrong = differences(reported, trace_says)
    if wrong:
        raise harness.Refused("diffusion metrics are wrong: " + "; ".join(wrong) + ".")
    kept = (
        "completed",
        "duration",
        "output_throughput",
        "mean_ttft_ms",
        "mean_tpot_ms",
        "median_itl_ms",
        "diffusion_committed_throughput",
    )
    report = {
        "bench": "serve_metrics",
        "machine": machine,
        "equal_to_the_trace": trace_says,
        "vllm_bench_serve": {name: reported[name] for name in kept if name in reported},
    }
    harness.publish(report, args.out / "serve_metrics.json")


if __name__ == "__main__":
    main()
