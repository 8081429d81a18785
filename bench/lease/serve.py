"""`vllm serve` of the 26B shape with made-up weights, and `vllm bench serve` against it: random
prompts of 1,024 tokens, answers of 1,024, FP8, 16 fixed steps a canvas.

    python -m bench.lease.serve

With even routing. Prints a line of JSON for each number of requests at once.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from bench import dummy_checkpoint
from bench.dummy_checkpoint import CANVAS, SCHEMES, SHAPES
from bench.full_shape_engine import EVEN, ROUTING

STEPS = 16
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
KEPT = (
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_e2el_ms",
    "completed",
    "total_output_tokens",
)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def serve(
    checkpoint: str, port: int, tokens: int, most: int, log: Path, more: list[str]
) -> subprocess.Popen[bytes]:
    options = ["--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-model-len", str(2 * tokens + CANVAS), "--max-num-seqs", str(most)]
    options += ["--diffusion-config", json.dumps({"canvas_length": CANVAS})]
    options += ["--worker-extension-cls", "bench.even_routing.EvenProbe"]
    if torch.cuda.is_available():  # beside other engines: what is free now is not its own
        options += ["--kv-cache-memory-bytes", "8G", "--gpu-memory-utilization", "0.25"]
    else:
        options += ["--kv-cache-memory-bytes", "1G", "--enforce-eager", "--dtype", "bfloat16"]
    environment = os.environ | {ROUTING: EVEN}
    return subprocess.Popen(
        [*VLLM, "serve", checkpoint, *options, *more],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=environment,
    )


def wait_until_ready(server: subprocess.Popen[bytes], port: int, seconds: float) -> None:
    """Raises RuntimeError if it has ended or is not ready in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start in {seconds:.0f} s, status {server.poll()}")


def ask(checkpoint: str, port: int, tokens: int, at_once: int, folder: Path) -> dict[str, Any]:
    """What `vllm bench serve` finds."""
    file = f"{at_once}.json"
    options = ["--port", str(port), "--model", checkpoint, "--dataset-name", "random"]
    options += ["--random-input-len", str(tokens), "--random-output-len", str(tokens)]
    options += ["--num-prompts", str(2 * at_once + 2), "--max-concurrency", str(at_once)]
    options += ["--ignore-eos", "--save-result", "--result-dir", str(folder)]
    options += ["--result-filename", file, "--percentile-metrics", "ttft,tpot,e2el"]
    process = subprocess.run(
        [*VLLM, "bench", "serve", *options], capture_output=True, text=True, errors="replace"
    )
    if process.returncode:
        raise RuntimeError(f"vllm bench serve failed: {(process.stdout + process.stderr)[-1500:]}")
    found = json.loads((folder / file).read_text())
    return {key: found[key] for key in KEPT if key in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="26B")
    parser.add_argument("--scheme", choices=SCHEMES, default="fp8-dynamic")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt and of an answer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--start-by", type=float, default=600, help="seconds from now")
    parser.add_argument("--turn", type=Path, help="ask when this file is there")
    parser.add_argument("--out", type=Path, default=Path("/tmp"))
    parser.add_argument("options", nargs="*", help="more of `vllm serve`, behind --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), args.out / "serve.log"
    with tempfile.TemporaryDirectory() as folder:
        dummy_checkpoint.write(Path(folder), args.shape, args.scheme, STEPS)
        begun = time.monotonic()
        most = max(args.concurrency)
        server = serve(folder, port, args.tokens, most, log, args.options)
        try:
            wait_until_ready(server, port, args.start_by)
            print(json.dumps({"serve": args.scheme, "start_seconds": time.monotonic() - begun}))
            if args.turn:
                args.turn.with_name(f"{args.turn.name}-ready").touch()
            while args.turn and not args.turn.exists():
                time.sleep(0.2)
            for at_once in args.concurrency:
                found = ask(folder, port, args.tokens, at_once, Path(folder))
                asked = {"serve": args.scheme, "at_once": at_once, "tokens": args.tokens}
                print(json.dumps(asked | found), flush=True)
        except RuntimeError as failure:
            end = log.read_text(errors="replace").splitlines()[-15:]
            sys.exit("\n".join([str(failure), "the end of the server's log:", *end]))
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
