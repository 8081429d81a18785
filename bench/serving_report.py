"""Turns the runs of `bench.serving` into measures, bars and tables."""

from typing import Any

from bench import harness
from bench.step_split import outside_forward

OURS, TRANSFORMERS, STOCK = "vllm-dllm", "transformers", "stock vLLM"
SHORT, MIXED, LONG = "short", "mixed", "long"
BAR_OVER_TRANSFORMERS = {"1": 1.5}  # by concurrency, of mixed answers; else:
BAR_OVER_TRANSFORMERS_BATCHED = 2.0
BARS_OVER_STOCK = {SHORT: 2.0, MIXED: 1.5, LONG: 1.5}
BAR_OUTSIDE_FORWARD_MS = 5.0
Results = dict[str, dict[str, dict[str, Any]]]
"""[workload][system][concurrency] -> measures."""


def measures(run: dict[str, Any]) -> dict[str, float]:
    """Of one run, see bench/README.md."""
    tokens = sum(map(len, run["outputs"]))
    return {
        "answer_tokens_per_second": tokens / run["seconds"],
        "first_token_ms": 1000 * harness.spread(run["first_token_seconds"])["median"],
        "ms_per_forward": 1000 * run["seconds"] / run["forwards"],
        "forwards_per_token": run["forwards"] / tokens,
        "steps_per_block": run["steps_per_block"],
    }


def summarize(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and extremes of one system's rounds; the share of right answers is their mean."""
    return {
        "exact_match": sum(line["exact_match"] for line in rounds) / len(rounds),
        **{
            key: harness.spread([line[key] for line in rounds])
            for key in rounds[0]
            if key != "exact_match"
        },
    }


def summarize_split(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Median of each part, and of all but the forward."""
    parts = {name: harness.spread([step[name] for step in steps])["median"] for name in steps[0]}
    outside = [outside_forward(step) for step in steps]
    return {
        "steps": len(steps),
        **parts,
        "outside_forward_ms": harness.spread(outside)["median"],
        "outside_forward_mean_ms": sum(outside) / len(outside),
    }


def bars(results: Results, outside_forward_ms: float) -> list[dict[str, Any]]:
    """What we ask of this project, and whether it is met."""
    found: list[dict[str, Any]] = []
    for workload, by_system in results.items():

        def median(system: str, concurrency: str, key: str, of: Any = by_system) -> float:
            return of[system][concurrency][key]["median"]

        for concurrency in by_system[OURS]:
            wanted = {STOCK: BARS_OVER_STOCK[workload]}
            if workload == MIXED:
                wanted[TRANSFORMERS] = BAR_OVER_TRANSFORMERS.get(
                    concurrency, BAR_OVER_TRANSFORMERS_BATCHED
                )
            for system in wanted:
                ratio = median(OURS, concurrency, "answer_tokens_per_second") / median(
                    system, concurrency, "answer_tokens_per_second"
                )
                what = f"{workload}: times the answer tokens/s of {system}, {concurrency} at once"
                found.append(harness.bar(what, ratio, at_least=wanted[system]))
        if "1" in by_system[OURS]:
            ratio = median(OURS, "1", "forwards_per_token") / median(
                STOCK, "1", "forwards_per_token"
            )
            what = f"{workload}: share of {STOCK}'s forwards per token that are saved"
            saved = 1 / (median(STOCK, "1", "steps_per_block") + 1)
            found.append(harness.bar(what, 1 - ratio, at_least=saved))
    what = "ms of a step outside the model's forward, 1 at once"
    return [*found, harness.bar(what, outside_forward_ms, at_most=BAR_OUTSIDE_FORWARD_MS)]


def print_tables(results: Results, splits: dict[str, Any], found: list[dict[str, Any]]) -> None:
    print(
        f"\n{'answers':8}{'system':14}{'at once':>8}{'answer tok/s (min-max)':>24}"
        f"{'first token ms':>16}{'ms/forward':>12}{'forwards/tok':>14}{'steps/block':>13}"
        f"{'exact':>8}"
    )
    for workload, by_system in results.items():
        for system, by_concurrency in by_system.items():
            for concurrency, line in by_concurrency.items():
                rate = line["answer_tokens_per_second"]
                print(
                    f"{workload:8}{system:14}{concurrency:>8}"
                    f"{rate['median']:10.0f} ({rate['min']:5.0f} -{rate['max']:5.0f})"
                    f"{line['first_token_ms']['median']:16.0f}"
                    f"{line['ms_per_forward']['median']:12.1f}"
                    f"{line['forwards_per_token']['median']:14.3f}"
                    f"{line['steps_per_block']['median']:13.1f}{line['exact_match']:8.1%}"
                )
    print("\nOne step, one request at a time, ms (medians):")
    for name, split in splits.items():
        print(f"  {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in split.items()))
    print()
    harness.print_bars(found)
