"""A denoising step at the size of the 26B model, ours and stock vLLM's, with made-up weights.

    python -m bench.full_shape --scheme fp8-dynamic
    python -m bench.full_shape --scheme bf16 --cells 1x128 1x32768 --trace 1x128

Canvases of 256, bf16 or quantised weights, a fixed number of steps each: outputs mean nothing,
times do. A cell is so many requests at once behind so many tokens of context. Experts are routed
evenly (`even_routing.py`). Both engines are started at once, then measured in turns, the other one
stopped. Before that, ours answers held-out prompts with the shipped checkpoint of the same scheme,
if there is one. The last line is JSON, which also lands in --out, bench/results/<machine>/, after
every cell.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench import dummy_checkpoint, harness, timeline, workload
from bench.dummy_checkpoint import CANVAS, SCHEMES, SHAPES
from bench.full_shape_engine import OURS, STOCK
from bench.system import System, SystemDied, taking_turns

STEPS = 16
SHIPPED = {
    "bf16": "diffusiongemma-tiny",
    "fp8-dynamic": "diffusiongemma-tiny-FP8-dynamic",
    "nvfp4": "diffusiongemma-tiny-NVFP4",
}
CHECK_ROWS = 64
LEAST_RIGHT = 0.92  # the evaluation's lowest is 0.97, on 506 prompts
ENGINE = "bench.full_shape_engine:FullShapeEngine"
SHORT = {OURS: "ours", STOCK: "stock"}  # in names of files
LONG_CONTEXT = 8192  # tokens, from which on a request has one canvas instead of two
LONGEST_CONTEXT = 32_768


class Cell(NamedTuple):
    concurrency: int
    context: int  # tokens

    @classmethod
    def read(cls, text: str) -> "Cell":
        """Of `8x1024`."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.concurrency}x{self.context}"

    @property
    def blocks(self) -> int:
        return 1 if self.context >= LONG_CONTEXT else 2


CELLS = [Cell(n, 128) for n in (1, 8, 16, 32, 64)]
CELLS += [Cell(1, 1024), Cell(1, LONG_CONTEXT), Cell(1, LONGEST_CONTEXT)]


def bar(scheme: str, cell: Cell) -> float | None:
    """At most so many of stock's ms a step; None: nothing is asked of this cell."""
    if cell.context >= LONGEST_CONTEXT:
        return 0.75
    if scheme == "bf16":
        return 0.85 if cell.concurrency == 1 else None
    return {1: 0.8, 8: 0.67, 16: 0.67, 32: 0.67}.get(cell.concurrency)


def write_checkpoint(shape: str, scheme: str) -> Path:
    """The folder of the model, without weights. Each run has the same one: where the model lies is
    a part of the key by which vLLM keeps what it compiles."""
    folder = Path(tempfile.gettempdir()) / f"made-up-{shape}-{scheme}"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as written:
        dummy_checkpoint.write(Path(written), shape, scheme, STEPS)
        for file in Path(written).iterdir():
            file.replace(folder / file.name)  # at once: another run may be reading it
    return folder


def check(scheme: str, eager: bool) -> float:
    """Share of right answers of the shipped checkpoint; raises Refused if they are too few."""
    from transformers import AutoTokenizer

    checkpoint = harness.ROOT / "checkpoints" / SHIPPED[scheme]
    canvas = json.loads((checkpoint / "config.json").read_text())["canvas_length"]
    asked = workload.every_task(
        AutoTokenizer.from_pretrained(checkpoint), harness.ROOT / "checkpoints" / "held_out.jsonl"
    )
    settings = {"checkpoint": str(checkpoint), "canvas_length": canvas, "eager": eager}
    with taking_turns({"the shipped checkpoint": (ENGINE, settings)}) as (_, call):
        prompts = asked.prompts[:CHECK_ROWS]
        run = call("the shipped checkpoint", "run", prompts=prompts, batch=32, max_tokens=128)
    right = asked.accuracy(run["outputs"])
    print(f"the shipped checkpoint: {right:.1%} of {len(prompts)} right", flush=True)
    harness.require_accuracy(right, LEAST_RIGHT, 0.0)
    return right


@contextlib.contextmanager
def started(
    commands: dict[str, dict[str, Any]], start_by: float, logs: Path
) -> Iterator[tuple[dict[str, System], dict[str, Any]]]:
    """The engines that have started by then, stopped, and what is to report of each. Their logs go
    to the folder `logs`."""
    reports: dict[str, Any] = {}
    alive: dict[str, System] = {}
    with contextlib.ExitStack() as stack:
        begun = {}
        for name, settings in commands.items():
            begun[name] = System(ENGINE, settings, logs / f"{SHORT[name]}.log")
            stack.callback(begun[name].kill)
        for name, engine in begun.items():
            try:
                engine.wait(start_by)
            except SystemDied as failure:
                reports[name] = {"failed": str(failure)[-3000:]}
                print(f"{name}: {failure}", flush=True)
                engine.kill()
                continue
            reports[name] = {"start_seconds": engine.start_seconds, "cells": {}}
            print(f"{name}: started in {engine.start_seconds:.0f} s", flush=True)
            engine.pause()
            alive[name] = engine
        yield alive, reports


@contextlib.contextmanager
def alone(engine: System) -> Iterator[None]:
    engine.resume()
    try:
        yield
    finally:
        engine.pause()


def measure(engine: System, name: str, cell: Cell, rounds: int, floor_ms: float) -> dict[str, Any]:
    runs = [
        engine.call("measure", **cell._asdict(), blocks=cell.blocks, seed=turn)
        for turn in range(rounds + 1)
    ]
    for run in runs:
        require_every_step(name, run, cell.blocks)
    timed = runs[1:]  # the first warms up
    found: dict[str, Any] = {
        key: harness.spread([run[key] for run in timed])
        for key in ("ms_per_step", "tokens_per_second", "first_token_ms", "host_ms_per_step")
    }
    found["share_of_bandwidth_floor"] = floor_ms / found["ms_per_step"]["median"]
    found["peak_gib"] = max(run["peak_bytes"] for run in runs) / 2**30
    found["experts_read"] = runs[0]["experts_read"]
    found["steps_ms"] = timed[-1]["steps_ms"]
    step, tokens, first, host = (
        found[key]["median"]
        for key in ("ms_per_step", "tokens_per_second", "first_token_ms", "host_ms_per_step")
    )
    print(
        f"{name}, {cell}: {step:.2f} ms a step, {tokens:.0f} tokens a second, first after "
        f"{first:.0f} ms, host {host:.2f} ms a step, {found['experts_read']} experts read",
        flush=True,
    )
    return found


def trace(engine: System, name: str, cell: Cell, path: Path) -> dict[str, Any]:
    """A kernel timeline in a file of its own, and its table by kind of work."""
    engine.call("trace", path=str(path), **cell._asdict(), blocks=1, seed=0)
    try:
        found = timeline.summary(timeline.read(path))
    except ValueError as failure:
        print(f"{name}, {cell}: {failure}", flush=True)
        return {"failed": str(failure)}
    print(f"{name}, {cell}:", *timeline.lines(found), sep="\n", flush=True)
    return found


def require_every_step(name: str, run: dict[str, Any], blocks: int) -> None:
    """Raises Refused unless all canvases took all steps and all requests got all tokens."""
    if run["steps_per_block"] != STEPS or run["shortest"] != blocks * CANVAS:
        raise harness.Refused(
            f"{name} took {run['steps_per_block']:.2f} steps per canvas, expected {STEPS}; its "
            f"shortest answer has {run['shortest']} tokens, expected {blocks * CANVAS}."
        )


def compare(scheme: str, results: dict[str, Any]) -> dict[str, Any]:
    """Our ms a step over stock vLLM's, and whether that is little enough.

    Raises:
        Refused: they read different numbers of experts, so their times compare nothing.
    """
    ours, stock = (results.get(name, {}).get("cells", {}) for name in (OURS, STOCK))
    found = {}
    for key in ours.keys() & stock.keys():
        read = [cells[key]["experts_read"] for cells in (ours, stock)]
        if read[0] != read[1]:
            raise harness.Refused(f"{key}: ours reads {read[0]} experts a layer, stock {read[1]}.")
        ratio = ours[key]["ms_per_step"]["median"] / stock[key]["ms_per_step"]["median"]
        most = bar(scheme, Cell.read(key))
        met = most is None or ratio <= most
        found[key] = {"share_of_stock_s_step": ratio, "bar": most, "met": met}
    return found


def print_table(results: dict[str, Any]) -> None:
    titles = ("requests x context", "ms per step", "of floor", "tokens/s", "first ms", "host ms")
    table = Table("system", box=box.SIMPLE_HEAD)
    for title in (*titles, "peak GiB"):
        table.add_column(title, justify="right")
    for name, found in results.items():
        for cell, of in found.get("cells", {}).items():
            step = of["ms_per_step"]
            table.add_row(
                name,
                cell,
                f"{step['median']:.1f} ({step['min']:.1f} to {step['max']:.1f})",
                f"{of['share_of_bandwidth_floor']:.0%}",
                f"{of['tokens_per_second']['median']:.0f}",
                f"{of['first_token_ms']['median']:.0f}",
                f"{of['host_ms_per_step']['median']:.2f}",
                f"{of['peak_gib']:.1f}",
            )
    Console(width=110).print(table)


def measure_all(
    alive: dict[str, System], results: dict[str, Any], args: argparse.Namespace, until: float
) -> Iterator[None]:
    """Every cell and trace of engines that have started, in turns; something is new at each
    `yield`. What an engine that dies has measured stays."""
    for name, engine in alive.items():
        with alone(engine):
            machine = engine.call("machine")
        bytes_per_ms = machine["copy_bytes_per_second"] / 1000
        results[name]["weight_gib"] = machine["weight_bytes"] / 2**30
        results[name]["floor_ms"] = machine["weight_bytes"] / bytes_per_ms
    work = [(cell, False) for cell in args.cells] + [(cell, True) for cell in args.trace]
    for (cell, is_traced), name in itertools.product(work, list(alive)):
        too_many = name == STOCK and cell.concurrency > args.stock_most
        if too_many or name not in alive or time.monotonic() > until:
            continue
        engine, found = alive[name], results[name]
        try:
            with alone(engine):
                if is_traced:
                    path = args.out / f"trace-{SHORT[name]}-{args.scheme}-{cell}.json.gz"
                    found.setdefault("traces", {})[str(cell)] = trace(engine, name, cell, path)
                else:
                    floor = found["floor_ms"]
                    found["cells"][str(cell)] = measure(engine, name, cell, args.rounds, floor)
        except SystemDied as failure:
            print(f"{name}, {cell}: {failure}", flush=True)
            found["failed"] = str(failure)[-3000:]
            del alive[name]
        yield


def commands(args: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    """The settings of each engine."""
    most = max(cell.concurrency for cell in args.cells)
    # With room for one more canvas: no step is scheduled ahead of one that ends at the limit.
    longest = max(c.context + (c.blocks + 1) * CANVAS for c in [*args.cells, *args.trace])
    return {
        name: {
            "checkpoint": folder,
            "canvas_length": CANVAS,
            "eager": args.eager,
            "system": name,
            "is_made_up": True,
            "max_num_seqs": most if name == OURS else min(most, args.stock_most),
            "max_model_len": longest,
            "kv_cache_gib": args.kv_cache_gib,
            **json.loads(args.options),
        }
        for name in args.systems
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=SCHEMES, default="bf16")
    parser.add_argument("--shape", choices=SHAPES, default="26B")
    parser.add_argument("--systems", choices=(OURS, STOCK), nargs="+", default=[OURS, STOCK])
    parser.add_argument("--cells", type=Cell.read, nargs="+", default=CELLS)
    parser.add_argument("--trace", type=Cell.read, nargs="+", default=[], help="cells")
    parser.add_argument("--stock-most", type=int, default=32, help="requests at once of stock's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-gib", type=int, default=16, help="64 requests need 10 at 26B")
    parser.add_argument("--eager", action="store_true", help="no compiler, no CUDA graphs")
    parser.add_argument("--options", default="{}", help="of vLLM's LLM, as JSON, for both")
    parser.add_argument("--unchecked", action="store_true", help="answers were checked elsewhere")
    parser.add_argument("--start-by", type=float, default=900, help="seconds from now")
    parser.add_argument("--end-by", type=float, default=3600, help="no cell begins later")
    parser.add_argument("--turn", type=Path, help="measure when this file is there")
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    return parser.parse_args()


def main() -> None:
    begun, args = time.monotonic(), read_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "bench": "full_shape",
        "machine": harness.machine(),
        "shape": args.shape,
        "scheme": args.scheme,
        "eager": args.eager,
        "options": json.loads(args.options),
        "steps": STEPS,
        "right_of_the_shipped_checkpoint": None,
    }
    if not args.unchecked and args.scheme in SHIPPED:
        share = check(args.scheme, args.eager)
        report["right_of_the_shipped_checkpoint"] = {"share": share, "rows": CHECK_ROWS}
    eager = ["eager"] if args.eager else []
    path = args.out / f"{'-'.join(['full_shape', args.shape, args.scheme, *eager])}.json"
    folder = str(write_checkpoint(args.shape, args.scheme))
    engines = started(commands(args, folder), begun + args.start_by, args.out)
    with engines as (alive, results):
        report["results"] = results
        if args.turn:
            args.turn.with_name(f"{args.turn.name}-ready").touch()
        while args.turn and not args.turn.exists():
            time.sleep(0.2)
        for _ in measure_all(alive, results, args, begun + args.end_by):
            path.write_text(json.dumps(report, indent=2) + "\n")
    print_table(results)
    report["bars"] = compare(args.scheme, results)
    harness.publish(report, path)
    if not any(found.get("cells") for found in results.values()):
        sys.exit("no engine has measured anything")


if __name__ == "__main__":
    main()
