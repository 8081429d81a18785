"""What serving a masked model costs, and what its threshold does to the answers.

    python -m bench.masked CHECKPOINT

The checkpoint, of SDAR's architecture, answers held-out prompts greedily, in blocks of 4 and of 32:
in the published loop over transformers; in our engine with a commit of its own for every block, as
other servers have it; in our engine as it is, with the parts of its steps; with several blocks in
flight; and with drafts that the model verifies. Forwards of a block, one request at a time, stand
beside the steps that the published loop took for it. Then at several thresholds: exact match, and
tokens per forward. Refuses to report when answers are worse than the published loop's.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import AutoTokenizer

from bench import harness, workload
from bench.serving_report import summarize_split
from bench.system import Call, taking_turns

BLOCK_LENGTHS = (4, 32)
CONCURRENCIES = (1, 16)
THRESHOLD = 0.9
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
MOST_POINTS_BELOW = 0.5
PUBLISHED, SEPARATE, OURS = "published loop", "separate commits", "vllm-dllm"
FLYING, VERIFIED = "blocks in flight", "verified drafts"
IN_FLIGHT = {4: 4, 32: 2}
"""Blocks, by their length."""
SYSTEMS = (PUBLISHED, SEPARATE, OURS, FLYING, VERIFIED)


def commands(checkpoint: Path, block_length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    common = {"checkpoint": str(checkpoint), "block_length": block_length}
    engines: dict[str, dict[str, Any]] = {
        SEPARATE: {"separate_commits": True},
        OURS: {},
        FLYING: {"blocks_in_flight": IN_FLIGHT[block_length]},
        VERIFIED: {"blocks_in_flight": 2, "verifies": True},
    }
    return {PUBLISHED: ("bench.masked_transformers:Loop", common)} | {
        name: ("bench.masked_engine:MaskedEngine", common | own) for name, own in engines.items()
    }


def num_blocks(prompts: list[list[int]], outputs: list[list[int]], length: int) -> int:
    """That answers have tokens in; counted from each prompt's first token."""
    pairs = zip(prompts, outputs, strict=True)
    ends = ((len(prompt), len(prompt) + len(output)) for prompt, output in pairs)
    return sum((end - 1) // length - start // length + 1 for start, end in ends)


def ask(
    call: Call,
    system: str,
    asked: workload.Workload,
    batch: int,
    threshold: float = THRESHOLD,
    method: str = "run",
) -> Any:
    """What a system's `run` returns, a dict of seconds, outputs and forwards; or its `split`, the
    parts of every step."""
    return call(
        system,
        method,
        prompts=asked.prompts,
        batch=batch,
        max_tokens=asked.max_tokens,
        threshold=threshold,
    )


def curve(call: Call, asked: workload.Workload) -> list[dict[str, float]]:
    """By threshold, one prompt at a time, so that forwards are a prompt's own."""
    found = []
    for threshold in THRESHOLDS:
        run = ask(call, OURS, asked, 1, threshold)
        tokens = sum(map(len, run["outputs"]))
        found.append(
            {
                "threshold": threshold,
                "exact_match": asked.accuracy(run["outputs"]),
                "tokens_per_forward": tokens / run["forwards"],
            }
        )
        print(found[-1], flush=True)
    return found


def speed(call: Call, asked: workload.Workload, rounds: int, block_length: int) -> dict[str, Any]:
    """[concurrency][system] -> tokens a second, and forwards a block of one request at a time."""
    found: dict[str, Any] = {}
    for concurrency in CONCURRENCIES:
        seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        last: dict[str, Any] = {}
        for _ in range(rounds):
            for name, own in seconds.items():
                last[name] = ask(call, name, asked, concurrency)
                own.append(last[name]["seconds"])
        by_system: dict[str, dict[str, Any]] = {}
        found[str(concurrency)] = by_system
        for name, own in seconds.items():
            outputs = last[name]["outputs"]
            tokens = sum(map(len, outputs))
            by_system[name] = {"tokens_per_second": harness.spread([tokens / s for s in own])}
            if concurrency == 1:
                blocks = num_blocks(asked.prompts, outputs, block_length)
                by_system[name]["forwards_per_block"] = last[name]["forwards"] / blocks
                by_system[name]["tokens_per_forward"] = tokens / last[name]["forwards"]
                if name == PUBLISHED:
                    by_system[name]["steps_per_block"] = last[name]["steps"] / blocks
        for name in (PUBLISHED, SEPARATE):
            by_system[OURS][f"times {name}"] = statistics.median(
                other / own for own, other in zip(seconds[OURS], seconds[name], strict=True)
            )
        for name in (FLYING, VERIFIED):
            by_system[name][f"times {OURS}"] = statistics.median(
                other / own for own, other in zip(seconds[name], seconds[OURS], strict=True)
            )
        steps = ask(call, OURS, asked, concurrency, method="split")
        by_system[OURS]["step"] = summarize_split(steps)
        print(f"block {block_length}, {concurrency} at once: {by_system}", flush=True)
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for length, found in report["results"].items():
        points = found["curve"]
        across = [point["tokens_per_forward"] for point in points]
        up = [100 * point["exact_match"] for point in points]
        axes.plot(across, up, "o-", label=f"blocks of {length}")
        for x, y, point in zip(across, up, points, strict=True):
            axes.annotate(
                f"{point['threshold']:g}", (x, y), (3, 4), textcoords="offset points", fontsize=8
            )
    axes.set(xlabel="tokens per forward", ylabel="exact match, %", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="thresholds")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", default=harness.ROOT / "checkpoints/sdar-tiny"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64, help="that are timed")
    parser.add_argument("--checked", type=int, help="prompts that are answered; default: all")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    held_out = workload.every_task(tokenizer, harness.ROOT / "checkpoints/held_out.jsonl")
    all_prompts, timed = (
        replace(held_out, prompts=held_out.prompts[:count])
        for count in (args.checked, args.prompts)
    )
    report: dict[str, Any] = {"machine": harness.machine(), "threshold": THRESHOLD, "results": {}}
    for length in BLOCK_LENGTHS:
        with taking_turns(commands(args.checkpoint, length)) as (_, call):
            right: dict[str, float] = {}
            answers: dict[str, list[list[int]]] = {}
            for name in SYSTEMS:
                answers[name] = ask(call, name, all_prompts, 32)["outputs"]
                right[name] = all_prompts.accuracy(answers[name])
            print(f"block {length}: exact match {right}", flush=True)
            harness.require_accuracy(right[OURS], right[PUBLISHED], MOST_POINTS_BELOW)
            same = sum(a == b for a, b in zip(answers[OURS], answers[PUBLISHED], strict=True))
            report["results"][str(length)] = {
                "exact_match": right,
                "prompts": len(all_prompts.prompts),
                "same_answers_as_the_published_loop": same,
                "speed": speed(call, timed, args.rounds, length),
                "curve": curve(call, all_prompts),
            }
    folder = harness.results_folder()
    plot(report, folder / "masked.png")
    harness.publish(report, folder / "masked.json")


if __name__ == "__main__":
    main()
