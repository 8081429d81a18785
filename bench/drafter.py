"""A target alone, with stock vLLM's DFlash, and with ours at every width policy, side by side.

    python -m bench.drafter

Same target, drafter and prompts, greedy, fp32. See bench/README.md.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from bench import harness, workload
from bench.drafter_oracle import best_widths
from bench.drafter_report import (
    ALONE,
    FIXED,
    STOCK,
    Results,
    bars,
    measures,
    print_tables,
    summarize,
)
from bench.system import Call, taking_turns
from bench.workload import Workload
from checkpoints.recipes import tasks

ENGINE = "bench.drafter_engine:DraftEngine"
MIXED, FOREIGN, CONTEXT = "mixed", "foreign", "long context"
PROMPTS = {1: 32, 4: 64, 16: 128}  # by concurrency
FOREIGN_TOKENS, CONTEXT_TOKENS = 200, 1700


def documents(tokenizer: Any, num_tokens: int, count: int) -> Workload:
    """Prompts with documents before the question, which neither target nor drafter was trained on:
    the answers do not matter, and are hard to guess."""
    rng = random.Random(0)
    messages = []
    for _ in range(count):
        example = tasks.generate(rng, "lookup_short", held_out=False)
        text = example.prompt
        while len(tokenizer(text).input_ids) < num_tokens:
            text = f"{tasks.generate(rng, 'lookup', held_out=False).prompt} {text}"
        ids = tokenizer(text).input_ids[-num_tokens:]
        messages.append([{"role": "user", "content": tokenizer.decode(ids)}])
    return Workload.build(tokenizer, messages, [""] * count, max_tokens=32)


def systems(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of each system, beside the target."""
    drafter = {"drafter": str(args.drafter), "num_drafts": args.num_drafts}
    blockpilot = {"width_policy": "blockpilot", "predictor": str(args.predictor)}
    ours: dict[str, dict[str, Any]] = {
        FIXED: {},
        "acceptance": {"width_policy": "acceptance"},
        "load": {"width_policy": "load", "load_rows": args.load_rows},
        "blockpilot": blockpilot,
        "blockpilot, narrow drafts": blockpilot | {"narrow_draft": True},
    }
    return {
        ALONE: {},
        STOCK: drafter | {"is_stock": True},
        **{name: drafter | {"settings": own} for name, own in ours.items()},
    }


def require_same_answers(outputs: dict[str, list[list[int]]]) -> None:
    """Raises Refused unless every system answers as the target does alone."""
    for name, answers in outputs.items():
        different = sum(a != b for a, b in zip(outputs[ALONE], answers, strict=True))
        if different:
            raise harness.Refused(
                f"{name} answers {different} of {len(answers)} prompts differently from the target "
                f"alone."
            )


def measure(
    call: Call,
    names: list[str],
    given: Workload,
    num_prompts: int,
    concurrency: int,
    num_rounds: int,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Measures of each system, and the answers; refuses if one differs."""
    prompts = given.prompts[:num_prompts]
    options = {"batch": concurrency, "max_tokens": given.max_tokens, "temperature": 0.0}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for index in range(num_rounds + 1):  # the first one warms up
        outputs: dict[str, list[list[int]]] = {}
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            run = call(name, "run", prompts=prompts, **options)
            outputs[name] = run["outputs"]
            runs[name] += [measures(run)] if index else []
        require_same_answers(outputs)
    return {name: summarize(rounds) for name, rounds in runs.items()}, outputs[ALONE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("checkpoints/qwen3-tiny-target"))
    parser.add_argument("--drafter", type=Path, default=Path("checkpoints/qwen3-tiny-dflash"))
    parser.add_argument("--predictor", type=Path, default=Path("checkpoints/qwen3-tiny-blockpilot"))
    parser.add_argument("--held-out", type=Path, default=Path("checkpoints/held_out.jsonl"))
    parser.add_argument("--num-drafts", type=int, default=15)
    parser.add_argument("--load-rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(PROMPTS))
    parser.add_argument("--out", type=Path, default=harness.results_folder())
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    from transformers import AutoTokenizer

    machine = harness.machine()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    workloads = {
        MIXED: workload.every_task(tokenizer, args.held_out),
        FOREIGN: documents(tokenizer, FOREIGN_TOKENS, count=64),
        CONTEXT: documents(tokenizer, CONTEXT_TOKENS, count=16),
    }
    asked = systems(args)
    results: Results = {kind: {name: {} for name in asked} for kind in workloads}
    profiles: dict[str, dict[str, Any]] = {name: {} for name in (ALONE, STOCK, FIXED)}
    target = {"target": str(args.target)}
    commands = {name: (ENGINE, target | settings) for name, settings in asked.items()}
    answers: list[list[int]] = []  # to the first mixed prompts
    with taking_turns(commands) as (_, call):
        for concurrency in args.concurrency:
            for kind, given in workloads.items():
                num_prompts = PROMPTS.get(concurrency, 2 * concurrency)
                found, said = measure(
                    call, list(asked), given, num_prompts, concurrency, args.rounds
                )
                if kind == MIXED and len(said) > len(answers):
                    answers = said
                for name, line in found.items():
                    results[kind][name][str(concurrency)] = line
                print(f"{kind}, {concurrency} at once: measured", flush=True)
            mixed = workloads[MIXED]
            for name, by_concurrency in profiles.items():
                steps = call(
                    name,
                    "split",
                    prompts=mixed.prompts[:64],
                    batch=concurrency,
                    max_tokens=mixed.max_tokens,
                    temperature=0.0,
                )
                by_concurrency[str(concurrency)] = summarize(steps)
    mixed_prompts = workloads[MIXED].prompts[: len(answers)]
    oracle = best_widths(args.target, args.drafter, mixed_prompts, answers, args.num_drafts)
    met = bars(results)
    print_tables(results, profiles, oracle, met)
    report = {
        "bench": "drafter",
        "machine": machine,
        "dtype": "float32",
        "systems": asked,
        "prompts": {str(c): PROMPTS.get(c, 2 * c) for c in args.concurrency},
        "max_tokens": {kind: given.max_tokens for kind, given in workloads.items()},
        "results": results,
        "step_profile": profiles,
        "oracle": oracle,
        "bars": met,
    }
    harness.publish(report, args.out / "drafter.json")


if __name__ == "__main__":
    main()
