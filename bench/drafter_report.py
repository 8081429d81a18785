"""Turns the runs of `bench.drafter` into measures, bars and tables."""

from typing import Any

from bench import harness

ALONE, STOCK, FIXED = "no drafter", "stock vLLM's DFlash", "fixed"
LEAST_OF = {STOCK: 1.0, ALONE: 0.95}  # tokens per second
Results = dict[str, dict[str, dict[str, Any]]]
"""[workload][system][concurrency] -> measures."""


def measures(run: dict[str, Any]) -> dict[str, float]:
    """Of one run, see bench/README.md."""
    tokens = sum(map(len, run["outputs"]))
    found = {
        "answer_tokens_per_second": tokens / run["seconds"],
        "ms_per_forward": 1000 * run["seconds"] / run["forwards"],
        "first_token_ms": 1000 * harness.spread(run["first_token_seconds"])["median"],
    }
    counted = run["counted"]
    if drafts := counted.get("drafts", 0):
        found["tau"] = 1 + counted["accepted_tokens"] / drafts
        found["drafted"] = counted["draft_tokens"] / drafts
    return found


def summarize(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and extremes of what every round has."""
    keys = [key for key in rounds[0] if all(key in line for line in rounds)]
    return {key: harness.spread([line[key] for line in rounds]) for key in keys}


def bars(results: Results) -> list[dict[str, Any]]:
    """What we ask of this project, and whether it is met."""
    found = []
    for kind, by_system in results.items():
        for name in (n for n in by_system if n not in (ALONE, STOCK)):
            for base, least in LEAST_OF.items():
                if base not in by_system:
                    continue
                for concurrency, line in by_system[name].items():
                    ratio = (
                        line["answer_tokens_per_second"]["median"]
                        / by_system[base][concurrency]["answer_tokens_per_second"]["median"]
                    )
                    what = f"{kind}: {name}, times the tokens/s of {base}, {concurrency} at once"
                    found.append(harness.bar(what, ratio, at_least=least))
    return found


def print_results(results: Results) -> None:
    print(
        f"\n{'answers':14}{'system':28}{'at once':>8}{'answer tok/s (min-max)':>26}"
        f"{'of alone':>10}{'ms/forward':>12}{'tau':>7}{'drafted':>9}"
    )
    for kind, by_system in results.items():
        for name, by_concurrency in by_system.items():
            for concurrency, line in by_concurrency.items():
                rate = line["answer_tokens_per_second"]
                alone = by_system[ALONE][concurrency]["answer_tokens_per_second"]["median"]
                tau, drafted = (
                    f"{line[key]['median']:.2f}" if key in line else ""
                    for key in ("tau", "drafted")
                )
                print(
                    f"{kind:14}{name:28}{concurrency:>8}"
                    f"{rate['median']:12.0f} ({rate['min']:5.0f} -{rate['max']:5.0f})"
                    f"{rate['median'] / alone:10.2f}{line['ms_per_forward']['median']:12.1f}"
                    f"{tau:>7}{drafted:>9}"
                )


def print_tables(
    results: Results,
    profiles: dict[str, dict[str, Any]],
    oracle: dict[str, Any],
    found: list[dict[str, Any]],
) -> None:
    print_results(results)
    fixed = ", ".join(f"{width}: {tau:.2f}" for width, tau in oracle["tau_of_fixed"].items())
    print(f"\nThe best width of each mixed prompt: tau {oracle['tau']:.2f}; fixed widths {fixed}")
    print("\nOne step, ms (medians):")
    for name, by_concurrency in profiles.items():
        for concurrency, line in by_concurrency.items():
            medians = ", ".join(f"{key} {value['median']:.2f}" for key, value in line.items())
            print(f"  {name}, {concurrency} at once: {medians}")
    print()
    harness.print_bars(found)
