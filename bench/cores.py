"""What the choice of cores and threads is worth, for a small model and one 150 times as large.

    python -m bench.cores

A denoise step and tokens per second at 1, 8 and 32 requests: this project with a core reserved, as
vLLM starts its CPU worker, and as it starts by default, next to transformers on all cores.
The shipped checkpoint answers held-out prompts in fp32; 267 million random weights take a fixed
number of steps in bf16, canvas 256. The systems take turns. The last line is JSON, which also lands
in bench/results/<machine>/. Nine minutes on two cores, and four more the first time, for compiling.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import dummy_checkpoint, harness, workload
from bench.engine import CanvasEngine
from bench.system import Call, taking_turns

RESERVED, DEFAULT, TRANSFORMERS = "a core reserved", "default", "transformers"
SYSTEMS: dict[str, tuple[str, dict[str, str]]] = {
    RESERVED: ("bench.cores:CoresEngine", {"reserved": "1"}),
    DEFAULT: ("bench.cores:CoresEngine", {}),
    TRANSFORMERS: ("bench.transformers_generate:Reference", {}),
}
MAX_REQUESTS = 32
SHIPPED, LARGE = "shipped", "267M"
PROMPTS = {1: 32, 8: 64, 32: 128}  # of the shipped checkpoint, by requests at once
STEPS = {1: 8, 8: 4, 32: 3}  # of the large one
LARGE_PROMPT = 16  # tokens
MAX_POINTS_BELOW = 3.0
LLAMA_CPP_MS = 846  # a step of another 267M model, canvas 256, bf16, on two cores of an AMD EPYC
BAR_OVER_LLAMA_CPP, BAR_OVER_TRANSFORMERS, BAR_OVER_RESERVED = 1.8, 2.0, 0.97

Cells = dict[str, dict[str, dict[str, Any]]]
"""[system][requests at once] -> medians and spreads."""


class CoresEngine(CanvasEngine):
    def __init__(
        self, checkpoint: str, canvas_length: int, dtype: str, reserved: str | None = None
    ) -> None:
        """`reserved`: cores that vLLM leaves alone."""
        if reserved is not None:
            os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = reserved
        super().__init__(
            checkpoint,
            canvas_length,
            dtype=dtype,
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=MAX_REQUESTS * canvas_length + 2048,
            worker_extension_cls="bench.full_shape_engine.WorkerProbe",
        )

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the median step, timed in the worker from the start of one to that of the next."""
        ask = self.llm.collective_rpc
        first = ask("num_forwards")[0]
        found = super().run(*args, **kwargs)
        return {**found, "ms_per_step": statistics.median(ask("steps_ms", args=(first,))[0])}


def measure_shipped(rounds: int, requests: list[int]) -> Cells:
    """Refuses to report when one system answers less well than transformers."""
    from transformers import AutoTokenizer

    folder = harness.ROOT / "checkpoints"
    checkpoint = folder / "diffusiongemma-tiny"
    canvas = json.loads((checkpoint / "config.json").read_text())["canvas_length"]
    asked = workload.every_task(
        AutoTokenizer.from_pretrained(checkpoint), folder / "held_out.jsonl"
    )

    def run(call: Call, name: str, count: int) -> dict[str, Any]:
        prompts = asked.prompts[: PROMPTS[count]]
        return call(name, "run", prompts=prompts, batch=count, max_tokens=asked.max_tokens)

    with taking_turns(_commands(checkpoint, canvas, "float32")) as (_, call):
        # Also the warm-up.
        right = {name: asked.accuracy(run(call, name, 32)["outputs"]) for name in SYSTEMS}
        for name in (RESERVED, DEFAULT):
            harness.require_accuracy(right[name], right[TRANSFORMERS], MAX_POINTS_BELOW)
        return _cells({n: [_turn(call, run, n) for _ in range(rounds)] for n in requests})


def measure_large(rounds: int, requests: list[int]) -> Cells:
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 10_000) for _ in range(LARGE_PROMPT)] for _ in range(32)]

    def run(call: Call, name: str, count: int) -> dict[str, Any] | None:
        options: dict[str, Any] = dict(prompts=prompts[:count], batch=count, max_tokens=canvas)
        if name != TRANSFORMERS:
            steps = {"diffusion_max_steps": STEPS[count]}
            options |= dict(ignore_eos=True, detokenize=False, extra_args=steps)
        elif count > 1:
            return None  # a minute per step
        return call(name, "run", **options)

    canvas = dummy_checkpoint.CANVAS
    with tempfile.TemporaryDirectory() as folder:  # vLLM's dummy weights make denormal numbers
        dummy_checkpoint.write(Path(folder), LARGE, "bf16", STEPS[1])
        dummy_checkpoint.add_weights(Path(folder))
        with taking_turns(_commands(Path(folder), canvas, "bfloat16")) as (_, call):
            for name in SYSTEMS:
                run(call, name, 1)  # warms up
            # Many requests take long, and their steps differ less.
            return _cells(
                {n: [_turn(call, run, n) for _ in range(rounds if n == 1 else 1)] for n in requests}
            )


def _commands(checkpoint: Path, canvas: int, dtype: str) -> dict[str, tuple[str, dict[str, Any]]]:
    common = {"checkpoint": str(checkpoint), "canvas_length": canvas, "dtype": dtype}
    return {name: (kind, common | own) for name, (kind, own) in SYSTEMS.items()}


def _turn(call: Call, run: Any, count: int) -> dict[str, dict[str, float]]:
    """One run of each system."""
    found = {}
    for name in SYSTEMS:
        if (result := run(call, name, count)) is not None:
            found[name] = {
                "ms_per_step": result["ms_per_step"],
                "tokens_per_second": sum(map(len, result["outputs"])) / result["seconds"],
            }
            print(
                f"{count} at once, {name}: {found[name]['ms_per_step']:.1f} ms per step", flush=True
            )
    return found


def _cells(turns: dict[int, list[dict[str, dict[str, float]]]]) -> Cells:
    return {
        name: {
            str(count): {
                key: harness.spread([turn[name][key] for turn in of_count])
                for key in of_count[0][name]
            }
            for count, of_count in turns.items()
            if name in of_count[0]
        }
        for name in SYSTEMS
    }


def bars(results: dict[str, Cells]) -> list[dict[str, Any]]:
    """What we ask of the choice, and whether it is met."""
    found = []
    for model, cells in results.items():
        for count, default in cells[DEFAULT].items():
            reserved = cells[RESERVED][count]["tokens_per_second"]["median"]
            ratio = default["tokens_per_second"]["median"] / reserved
            what = f"{model}, {count} at once, over a core reserved"
            found.append(harness.bar(what, ratio, at_least=BAR_OVER_RESERVED))
    if (large := results.get(LARGE)) and "1" in large[DEFAULT]:
        step = large[DEFAULT]["1"]["ms_per_step"]["median"]
        theirs = large[TRANSFORMERS]["1"]["ms_per_step"]["median"]
        for than, ms, least in (
            ("transformers", theirs, BAR_OVER_TRANSFORMERS),
            (f"llama.cpp's {LLAMA_CPP_MS} ms on an EPYC", LLAMA_CPP_MS, BAR_OVER_LLAMA_CPP),
        ):
            found.append(harness.bar(f"{LARGE}, a step, over {than}", ms / step, at_least=least))
    return found


def print_table(results: dict[str, Cells]) -> None:
    """In Markdown, as LOG.md has it."""
    table = Table(box=box.MARKDOWN)
    table.add_column("model, at once")
    for name in SYSTEMS:
        table.add_column(f"{name}: ms per step (tokens/s)", justify="right")
    for model, cells in results.items():
        for count in cells[DEFAULT]:
            row = [cells[name].get(count) for name in SYSTEMS]
            table.add_row(f"{model}, {count}", *(_show(cell) if cell else "" for cell in row))
    Console(width=140).print(table)


def _show(cell: dict[str, Any]) -> str:
    step, tokens = cell["ms_per_step"]["median"], cell["tokens_per_second"]["median"]
    return f"{step:.3g} ({tokens:.3g})" if step < 1000 else f"{step:.0f} ({tokens:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--models", choices=[SHIPPED, LARGE], nargs="+", default=[SHIPPED, LARGE])
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    machine = harness.machine()
    measure = {SHIPPED: measure_shipped, LARGE: measure_large}
    results = {model: measure[model](args.rounds, args.requests) for model in args.models}
    found = bars(results)
    print_table(results)
    harness.print_bars(found)
    report = {"bench": "cores", "machine": machine, "results": results, "bars": found}
    harness.publish(report, args.out / "cores.json")


if __name__ == "__main__":
    main()
