"""The picture of an evaluation: one panel per measure, one bar per checkpoint and score."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vllm_dllm.tools.evaluate.report import Row

Measure = Callable[[Row], float | None]
PANELS: list[tuple[str, str, Measure, bool]] = [
    ("accuracy, %", "{:.1f}", lambda row: 100 * row.accuracy, True),
    ("recovery, % of the first", "{:.1f}", lambda row: _percent(row.recovery), True),
    ("denoising steps per block", "{:.2f}", lambda row: row.steps_per_block, True),
    ("generated tokens per second", "{:.0f}", lambda row: row.tokens_per_second, True),
    ("weights on disk, MB", "{:.2f}", lambda row: row.disk_bytes / 1e6, False),
    ("weights in memory, MB", "{:.2f}", lambda row: row.weight_bytes / 1e6, False),
]
"""Heading, label format, measure, whether it differs between tasks."""


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws all rows; `title` says how they were measured."""
    checkpoints = list(dict.fromkeys(row.checkpoint for row in rows))
    scores = list(dict.fromkeys((row.task, row.score) for row in rows))
    panel_inches = max(3.3, len(scores) * max(1.1, 0.55 * len(checkpoints)))
    figure = Figure(figsize=(3 * panel_inches, 6))
    grid = figure.subplots(2, 3)
    figure.suptitle(title, fontsize=9)
    for axes, (heading, label, measure, by_task) in zip(grid.flat, PANELS, strict=True):
        for i, checkpoint in enumerate(checkpoints):
            own = {(r.task, r.score): r for r in rows if r.checkpoint == checkpoint}
            shown = [own[score] for score in (scores if by_task else scores[:1])]
            _bars(axes, shown, i, len(checkpoints), measure, label)
        names = ["\n".join((t, *s.split(", "))) for t, s in scores] if by_task else [""]
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.set_title(heading, fontsize=10)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(
    axes: Any, rows: Sequence[Row], number: int, count: int, measure: Measure, label: str
) -> None:
    """Draws one checkpoint's bars beside the others'; none where nothing was measured."""
    width = 0.8 / count
    places = [i + (number - (count - 1) / 2) * width for i in range(len(rows))]
    measured = zip(places, map(measure, rows), strict=True)
    found = [(x, value) for x, value in measured if value is not None]
    bars = axes.bar([x for x, _ in found], [v for _, v in found], 0.9 * width, label=rows[0].name)
    axes.bar_label(bars, [label.format(v) for _, v in found], padding=2, fontsize=8)
