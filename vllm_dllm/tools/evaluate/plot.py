"""The picture of an evaluation: one panel per measure, one bar per checkpoint and score."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from vllm_dllm.tools.evaluate.report import Row

PANELS: dict[str, tuple[str, Callable[[Row], float | None], bool]] = {
    "accuracy, %": ("{:.1f}", lambda row: 100 * row.accuracy, True),
    "recovery, % of the first": ("{:.1f}", lambda row: row.recovery and 100 * row.recovery, True),
    "denoising steps per block": ("{:.2f}", lambda row: row.steps_per_block, True),
    "generated tokens per second": ("{:.0f}", lambda row: row.tokens_per_second, True),
    "weights on disk, MB": ("{:.2f}", lambda row: row.disk_bytes / 1e6, False),
    "weights in memory, MB": ("{:.2f}", lambda row: row.weight_bytes / 1e6, False),
}
"""Heading -> label format, measure, whether it differs between tasks."""


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws all rows; `title` says how they were measured."""
    scores = list(dict.fromkeys("\n".join((row.task, *row.score.split(", "))) for row in rows))
    names = {row.checkpoint: row.name for row in rows}
    panel_inches = max(3.3, len(scores) * max(1.1, 0.55 * len(names)))
    figure = Figure(figsize=(3 * panel_inches, 6))
    figure.suptitle(title, fontsize=9)
    for axes, (heading, (label, measure, by_task)) in zip(
        figure.subplots(2, 3).flat, PANELS.items(), strict=True
    ):
        bars = pd.DataFrame(
            {c: [measure(row) for row in rows if row.checkpoint == c] for c in names},
            index=scores,
            dtype=float,
        ).rename(columns=names)
        if not by_task:
            bars = bars.iloc[:1].set_axis([""])
        bars.plot.bar(ax=axes, rot=0, width=0.8, legend=False, title=heading, fontsize=8)
        for drawn in axes.containers:
            axes.bar_label(drawn, fmt=label, padding=2, fontsize=8)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
