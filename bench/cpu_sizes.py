"""A denoise step on CPUs at sizes people use: shapes, number formats, requests at once, and how its
cost grows.

    python -m bench.cpu_sizes

Random weights of 4, 60 and 267 million parameters (1 billion on request) take a fixed number of
steps with canvases of 256 after prompts of 63 tokens. Systems of one group take turns: fp32, bf16
and transformers in both, then bf16 again and the quantised formats, uncompiled, because compiling
each for the first time takes a minute or two. Then one thing grows at a time:
canvas, context, vocabulary, requests. The shipped model answers held-out prompts in each format
first, and nothing is reported when one answers worse than transformers by more than it may. The
last line is JSON, which also lands in bench/results/<machine>/ beside a picture. About 50 minutes
on two quiet cores, and some more the first time; parts with `--shapes`, `--formats`, `--batches`,
`--growth`.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench import cpu_sizes_growth, cpu_sizes_report, harness, workload
from bench.cpu_sizes_checkpoints import FORMATS, make, shipped
from bench.cpu_sizes_report import TRANSFORMERS
from bench.dummy_checkpoint import CANVAS
from bench.system import Call, taking_turns

SHAPES, MORE_SHAPES = ["4M", "60M", "267M"], ["1B"]
PROMPT = 63  # tokens; no multiple of a canvas
STEPS = {1: 6, 8: 3, 32: 2}  # by requests at once; the first of them is not timed
CELL_S = 20.0  # what one system may take for all rounds of a cell, unless one round takes longer
MAX_POINTS_BELOW = {"nvfp4": 5.0, "w4a16": 5.0}
MOST_POINTS_BELOW = 3.0  # of the others

Cells = dict[str, dict[str, Any]]
"""[system][requests at once] -> medians and spreads; [system]["resident_bytes"]."""


def served_here() -> list[str]:
    """All formats, or all but int8 where servers refuse it."""
    from vllm_dllm.cpu.compat.ops import int8_sums_are_exact

    if int8_sums_are_exact():
        return list(FORMATS)
    print("int8: not run, this processor has no VNNI", flush=True)
    return [name for name in FORMATS if name != "int8"]


def check(formats: list[str]) -> dict[str, float]:
    """Share of right answers by format, and of transformers in fp32. Refuses when one is bad."""
    from transformers import AutoTokenizer

    from bench.cpu_sizes_checkpoints import SHIPPED

    canvas = 64
    held_out = SHIPPED.with_name("held_out.jsonl")
    asked = workload.every_task(AutoTokenizer.from_pretrained(SHIPPED), held_out)
    right = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = shipped(Path(folder), formats)
        commands = {TRANSFORMERS: _command(SHIPPED, "fp32", canvas, is_theirs=True)}
        for name, path in checkpoints.items():
            commands[name] = _command(path, name, canvas, is_eager=True)
        for name, command in commands.items():
            with taking_turns({name: command}) as (_, call):
                found = call(
                    name,
                    "run",
                    prompts=asked.prompts,
                    batch=32,
                    max_tokens=asked.max_tokens,
                )
            right[name] = asked.accuracy(found["outputs"])
            print(f"{name}: {right[name]:.1%} of the held-out answers are right", flush=True)
            bar = MAX_POINTS_BELOW.get(name, MOST_POINTS_BELOW)
            harness.require_accuracy(right[name], right[TRANSFORMERS], bar)
    return right


def _command(
    checkpoint: Path, name: str, canvas: int, is_eager: bool = False, is_theirs: bool = False
) -> tuple[str, dict[str, Any]]:
    """What `taking_turns` starts: a checkpoint in a format, in our engine or in transformers."""
    own = {"checkpoint": str(checkpoint), "canvas_length": canvas, "dtype": FORMATS[name].dtype}
    if is_theirs:
        return "bench.cpu_sizes_systems:SizesReference", own
    return "bench.cpu_sizes_systems:SizesEngine", own | {"eager": is_eager}


def groups(formats: list[str]) -> list[list[str]]:
    """Systems that take turns. Two groups, because all at once would not fit 24 GB."""
    plain = [name for name in formats if FORMATS[name].scheme is None]
    quantised = [name for name in formats if FORMATS[name].scheme is not None]
    first = [*plain, *(f"{TRANSFORMERS}, {name}" for name in plain)]
    second = [*(["bf16"] if "bf16" in formats else []), *quantised]
    return [group for group in (first, second if quantised else []) if group]


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Cells by group: a system may be in two."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = make(Path(folder), shape, args.formats)
        found = []
        for group in groups(args.formats):
            commands = {}
            for name in group:
                of = name.removeprefix(f"{TRANSFORMERS}, ")
                is_eager = any(FORMATS[other].scheme for other in group if other in FORMATS)
                commands[name] = _command(checkpoints[of], of, CANVAS, is_eager, name != of)
            with taking_turns(commands) as (_, call):
                found.append(_measure_group(call, shape, group, args))
        sizes = {name: _size(path) for name, path in checkpoints.items()}
        return {"groups": found, "disk_bytes": sizes}


def _size(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def _measure_group(call: Call, shape: str, group: list[str], args: argparse.Namespace) -> Cells:
    cells: Cells = {name: {} for name in group}
    warm_up = dict(count=1, prompt=PROMPT, canvas=CANVAS, steps=2, seed=0)
    for name in group:
        cells[name]["resident_bytes"] = call(name, "steps", **warm_up)["resident_bytes"]
    step_s: dict[str, float] = dict.fromkeys(group, 0.0)  # of one request
    for count in args.batches:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in group}
        rounds = {}
        for name in group:
            expected_s = STEPS[count] * count * step_s[name]
            if expected_s > args.longest:
                why = f"{STEPS[count]} steps would take about {expected_s:.0f} s"
                cells[name][str(count)] = {"not_run": why}
                print(f"{shape}, {name}, {count} at once: not run, {why}", flush=True)
                continue
            rounds[name] = max(1, min(args.rounds, math.floor(CELL_S / max(expected_s, 1e-9))))
        for turn in range(args.rounds):
            for name, most in rounds.items():
                if turn < most:
                    turns[name].append(
                        call(
                            name,
                            "steps",
                            count=count,
                            prompt=PROMPT,
                            canvas=CANVAS,
                            steps=STEPS[count],
                            seed=turn,
                        )
                    )
        for name in rounds:
            cells[name][str(count)] = cell = _cell(turns[name], count)
            step_s[name] = cell["ms_per_step"]["median"] / 1000 / count
            step_ms = cell["ms_per_step"]["median"]
            print(f"{shape}, {name}, {count} at once: {step_ms:.4g} ms per step", flush=True)
    return cells


def _cell(turns: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """A round's number is the median of its steps."""
    ms = [statistics.median(turn["steps_ms"]) for turn in turns]
    return {
        "ms_per_step": harness.spread(ms),
        "canvas_tokens_per_second": harness.spread([1000 * count * CANVAS / one for one in ms]),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="*", choices=[*SHAPES, *MORE_SHAPES], default=SHAPES)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="default: all served here")
    parser.add_argument("--batches", type=int, nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--growth", nargs="*", choices=cpu_sizes_growth.AXES, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--longest", type=float, default=80.0, help="seconds; longer cells are left out"
    )
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    args.formats = args.formats or served_here()
    report: dict[str, Any] = {"bench": "cpu_sizes", "machine": harness.machine()}
    report["exact_match"] = check(args.formats)
    report["shapes"] = {shape: measure(shape, args) for shape in args.shapes}
    axes = cpu_sizes_growth.AXES if args.growth is None else args.growth
    report["growth"] = {axis: cpu_sizes_growth.measure(axis, args.rounds) for axis in axes}
    report["bars"] = cpu_sizes_report.bars(report["shapes"])
    cpu_sizes_report.print_tables(report)
    if report["growth"]:
        cpu_sizes_report.plot(report, args.out / "cpu_sizes.png")
    harness.publish(report, args.out / "cpu_sizes.json")


if __name__ == "__main__":
    main()
