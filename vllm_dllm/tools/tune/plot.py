"""The picture of a search: accuracy against speed."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vllm_dllm.tools.tune.report import Confirmed
from vllm_dllm.tools.tune.search import Measured, Tried

PANELS: list[tuple[str, Callable[[Measured], float]]] = [
    ("tokens per forward", lambda measured: measured.tokens_per_forward),
    ("tokens per second, here", lambda measured: measured.tokens_per_second),
]


def plot(
    tried: Sequence[Tried],
    confirmed: Sequence[Confirmed],
    chosen: Confirmed,
    title: str,
    path: Path,
) -> None:
    """Draws every trial of the search, and the front's again, on the other prompts."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (label, speed) in zip(panels, PANELS, strict=True):
        axes.scatter(
            [speed(t.measured) for t in tried],
            [100 * t.measured.accuracy for t in tried],
            color="0.75",
            label="trials, on the prompts of the search",
        )
        ordered = sorted(confirmed, key=lambda c: speed(c.measured))
        value = [100 * c.accuracy.value for c in ordered]
        low = [100 * (c.accuracy.value - c.accuracy.low) for c in ordered]
        high = [100 * (c.accuracy.high - c.accuracy.value) for c in ordered]
        speeds = [speed(c.measured) for c in ordered]
        label_front = "the front, on the other prompts, 95%"
        axes.errorbar(speeds, value, (low, high), fmt="o-", capsize=3, label=label_front)
        for marked, marker, name in (
            (next(c for c in confirmed if c.tried.is_own), "s", "the checkpoint's own settings"),
            (chosen, "*", "written to defaults.yaml"),
        ):
            x, y = speed(marked.measured), 100 * marked.accuracy.value
            axes.scatter([x], [y], marker=marker, s=130, zorder=3, label=name)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy, %")
    panels[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)
