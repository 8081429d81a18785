"""The picture of a serving report: answer tokens per second by batch size, median and extremes."""

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = report["results"]
    batches = list(next(iter(results.values())))
    figure, axes = plt.subplots(figsize=(7, 4))
    width = 0.8 / len(results)
    for i, (system, by_batch) in enumerate(results.items()):
        rates = [by_batch[batch]["answer_tokens_per_second"] for batch in batches]
        medians = [rate["median"] for rate in rates]
        errors = [
            [rate["median"] - rate["min"] for rate in rates],
            [rate["max"] - rate["median"] for rate in rates],
        ]
        places = [j + (i - (len(results) - 1) / 2) * width for j in range(len(batches))]
        bars = axes.bar(places, medians, width, yerr=errors, capsize=3, label=system)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("answer tokens per second")
    machine = report["machine"]
    axes.set_title(f"{machine['cores']} cores, {machine['cpu']}, float32", fontsize=9)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
