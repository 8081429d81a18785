"""What stages of load save on a busy server: latency, steps, right answers.

    python -m bench.load

The shipped checkpoint answers the held-out prompts, so many at a time; as soon as one answer is
there, the next prompt is asked. Rounds of requests that allow no stage, the first, and both take
turns. Whether answers become worse is a result like the others. Refuses to report when the tests
of the stages are red.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from transformers import AutoTokenizer
from vllm import EngineArgs, LLMEngine, SamplingParams

from bench import harness, workload

CHECKPOINT = harness.ROOT / "checkpoints/diffusiongemma-tiny"
STAGES = [
    {"canvases": 16, "stability_threshold": 0},
    {"canvases": 32, "stability_threshold": 0, "confidence_threshold": 0.01},
]


def make_engine(most: int) -> LLMEngine:
    settings = {"load_stages": STAGES}
    return LLMEngine.from_engine_args(
        EngineArgs(
            str(CHECKPOINT),
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=most,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            diffusion_config={"canvas_length": 64},
            additional_config={"vllm_dllm": settings},
        )
    )


def run(
    engine: LLMEngine, asked: workload.Workload, concurrency: int, allowed: int
) -> dict[str, float]:
    """All prompts once. Latencies are from when a prompt is asked to its whole answer."""
    began: dict[str, float] = {}
    latencies, outputs = [], dict[int, list[int]]()
    started, steps = time.perf_counter(), 0
    while len(outputs) < len(asked.prompts):
        while len(began) < len(asked.prompts) and len(began) - len(outputs) < concurrency:
            number = len(began)
            began[str(number)] = time.perf_counter()
            params = SamplingParams(
                seed=number,
                max_tokens=asked.max_tokens,
                extra_args={"diffusion_load_stages": allowed},
            )
            engine.add_request(str(number), {"prompt_token_ids": asked.prompts[number]}, params)
        steps += 1
        for output in engine.step():
            if output.finished:
                latencies.append(time.perf_counter() - began[output.request_id])
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    in_order = [outputs[number] for number in range(len(asked.prompts))]
    return {
        "p50_ms": 1000 * statistics.median(latencies),
        "p95_ms": 1000 * statistics.quantiles(latencies, n=20)[-1],
        "answers_per_second": len(in_order) / seconds,
        "forwards": steps,
        "exact_match": asked.accuracy(in_order),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 24, 64])
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    harness.require_green("unit/config/test_files.py", "unit/step/test_canvas_step.py")
    report: dict[str, Any] = {"bench": "load", "machine": harness.machine(), "stages": STAGES}
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    asked = workload.every_task(tokenizer, harness.ROOT / "checkpoints/held_out.jsonl")
    engine = make_engine(max(args.concurrency))
    run(engine, asked, max(args.concurrency), 0)  # warms up
    for concurrency in args.concurrency:
        rounds: dict[int, list[dict[str, float]]] = {allowed: [] for allowed in range(3)}
        for _ in range(args.rounds):
            for allowed, found in rounds.items():
                found.append(run(engine, asked, concurrency, allowed))
        for allowed, found in rounds.items():
            line = {name: harness.spread([one[name] for one in found]) for name in found[0]}
            report[f"{concurrency} at once, {allowed} stages"] = line
            print(
                f"{concurrency:3} at once, {allowed} stages allowed: "
                + ", ".join(f"{name} {values['median']:.4g}" for name, values in line.items()),
                flush=True,
            )
    harness.publish(report, args.out / "load.json")


if __name__ == "__main__":
    main()
