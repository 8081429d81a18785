"""The picture of a serving report: speed and waiting, short and long answers."""

from pathlib import Path
from typing import Any

ROWS = {
    "answer_tokens_per_second": "answer tokens per second",
    "first_token_ms": "ms to the first token (median request)",
}


def plot(report: dict[str, Any], path: Path) -> None:
    """Medians as bars, the extremes of the rounds as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = report["results"]
    figure, grid = plt.subplots(
        len(ROWS), len(results), figsize=(6 * len(results), 7), squeeze=False
    )
    for row, (key, label) in zip(grid, ROWS.items(), strict=True):
        for axes, (workload, by_system) in zip(row, results.items(), strict=True):
            _bars(axes, by_system, key)
            axes.set_ylabel(label)
            limit = report["max_tokens"][workload]
            axes.set_title(f"{workload} answers, at most {limit} tokens", fontsize=9)
    grid[0][0].legend(fontsize=8)
    machine = report["machine"]
    figure.suptitle(f"{machine['cores']} cores, {machine['cpu']}, {report['dtype']}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: Any, by_system: dict[str, Any], key: str) -> None:
    concurrencies = list(next(iter(by_system.values())))
    width = 0.8 / len(by_system)
    for i, (system, by_concurrency) in enumerate(by_system.items()):
        values = [by_concurrency[concurrency][key] for concurrency in concurrencies]
        medians = [value["median"] for value in values]
        errors = [
            [value["median"] - value["min"] for value in values],
            [value["max"] - value["median"] for value in values],
        ]
        places = [j + (i - (len(by_system) - 1) / 2) * width for j in range(len(concurrencies))]
        bars = axes.bar(places, medians, width, yerr=errors, capsize=2, label=system)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_xticks(range(len(concurrencies)), [f"{c} at once" for c in concurrencies])
