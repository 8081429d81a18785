"""This project, transformers' `generate` and stock vLLM, side by side, on three kinds of answers.

    python -m bench.serving

Same checkpoint, same prompts, same end of an answer, fp32. See bench/README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench import harness, workload
from bench.plot import plot
from bench.serving_report import (
    LONG,
    MIXED,
    OURS,
    SHORT,
    STOCK,
    TRANSFORMERS,
    Results,
    bars,
    measures,
    print_tables,
    summarize,
    summarize_split,
)
from bench.system import Call, taking_turns
from bench.workload import Workload

SYSTEMS = {
    OURS: "bench.engine:CanvasEngine",
    TRANSFORMERS: "bench.transformers_generate:Reference",
    STOCK: "bench.stock_vllm:StockEngine",
}
MAX_POINTS_BELOW = 3.0
LEAST_OF_STOCK = 0.6  # its share of right answers in Triton's interpreter was 0.65 to 0.71
PROMPTS = {1: 32, 4: 64, 16: 128, 64: 128}  # by concurrency


def check(call: Call, every_task: Workload, num_prompts: int) -> dict[str, float]:
    """Exact match; refuses to go on if ours is behind or stock vLLM below its usual level."""
    prompts, found = every_task.prompts[:num_prompts], {}
    for name in SYSTEMS:
        run = call(name, "run", prompts=prompts, batch=32, max_tokens=every_task.max_tokens)
        found[name] = every_task.accuracy(run["outputs"])
        print(f"{name}: exact match {found[name]:.1%} of {len(prompts)}", flush=True)
    harness.require_accuracy(found[OURS], found[TRANSFORMERS], MAX_POINTS_BELOW)
    harness.require_accuracy(found[STOCK], LEAST_OF_STOCK, 0.0)
    return found


def measure(
    call: Call, workloads: dict[str, Workload], concurrencies: list[int], num_rounds: int
) -> tuple[Results, dict[str, Any]]:
    """All measures, and the split of a step of the two engines."""
    runs: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    # A host slows down and speeds up within minutes, so every round also takes the split.
    split_steps: dict[str, list[Any]] = {name: [] for name in SYSTEMS if name != TRANSFORMERS}
    for index in range(num_rounds + 1):  # the first one warms up
        for name, steps in split_steps.items():
            mixed = workloads[MIXED]
            taken = call(name, "split", prompts=mixed.prompts[:32], max_tokens=mixed.max_tokens)
            steps += taken if index else []
        for kind, asked in workloads.items():
            for concurrency in concurrencies:
                count = PROMPTS.get(concurrency, 2 * concurrency) if index else 2 * concurrency
                for name in [*list(SYSTEMS)[index % 3 :], *list(SYSTEMS)[: index % 3]]:
                    result = call(
                        name,
                        "run",
                        prompts=asked.prompts[:count],
                        batch=concurrency,
                        max_tokens=asked.max_tokens,
                    )
                    line = measures(result)
                    line["exact_match"] = asked.accuracy(result["outputs"])
                    if index:
                        runs.setdefault((kind, name, concurrency), []).append(line)
                    print(
                        f"round {index} {kind}, {concurrency} at once, {name}: "
                        f"{line['answer_tokens_per_second']:.0f} answer tok/s, "
                        f"{line['exact_match']:.0%} right",
                        flush=True,
                    )
    results: Results = {
        kind: {
            name: {str(c): summarize(runs[kind, name, c]) for c in concurrencies}
            for name in SYSTEMS
        }
        for kind in workloads
    }
    return results, {name: summarize_split(steps) for name, steps in split_steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/diffusiongemma-tiny"))
    parser.add_argument("--held-out", type=Path, default=Path("checkpoints/held_out.jsonl"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(PROMPTS))
    parser.add_argument("--check-rows", type=int, default=280, help="for the correctness check")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    from transformers import AutoTokenizer

    machine = harness.machine()
    canvas_length = json.loads((args.checkpoint / "config.json").read_text())["canvas_length"]
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    workloads = {
        SHORT: workload.short(tokenizer, args.held_out),
        MIXED: workload.every_task(tokenizer, args.held_out),
        LONG: workload.long(tokenizer, canvas_length),
    }
    own = {"checkpoint": str(args.checkpoint), "canvas_length": canvas_length}
    systems = {name: (kind, own) for name, kind in SYSTEMS.items()}
    with taking_turns(systems) as (settings, call):
        checked = check(call, workloads[MIXED], args.check_rows)
        results, splits = measure(call, workloads, args.concurrency, args.rounds)
    found = bars(results, splits[OURS]["outside_forward_ms"])
    print_tables(results, splits, found)
    report = {
        "bench": "serving",
        "machine": machine,
        "dtype": "float32",
        "max_tokens": {kind: asked.max_tokens for kind, asked in workloads.items()},
        "prompts": {str(c): PROMPTS.get(c, 2 * c) for c in args.concurrency},
        "exact_match_checked": {**checked, "rows": args.check_rows},
        "settings": settings,
        "results": results,
        "step_split": splits,
        "bars": found,
    }
    plot(report, args.out / "serving.png")
    harness.publish(report, args.out / "serving.json")


if __name__ == "__main__":
    main()
