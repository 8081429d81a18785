"""Reports the result of a search: how sure it is, a table, a picture of accuracy against speed, a
JSON file, and settings for `vllm serve`."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vllm_dllm.tools.evaluate.report import command
from vllm_dllm.tools.tune.search import Measured, Tried

Z_95, Z_97_5 = 1.959964, 2.241403  # normal quantiles of two-sided 95% and 97.5% intervals


@dataclass(frozen=True)
class Interval:
    """An estimated value, and the bounds between which it lies."""

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float], z: float = Z_95) -> Interval:
    """Returns Wilson's score interval of the mean of values from 0 to 1, for 95% unless `z` says
    otherwise. It is made for values of 0 and 1. Other values vary less, so their interval is wider
    than it need be.

    Source: Wilson, Probable inference, J. Am. Stat. Assoc. 22 (1927).
    """
    n, mean = len(values), math.fsum(values) / len(values)
    weight = z**2 / n
    centre = (mean + weight / 2) / (1 + weight)
    half = z * math.sqrt(mean * (1 - mean) / n + weight / (4 * n)) / (1 + weight)
    # For a mean of 0 or 1 that bound is the mean itself, but for rounding.
    return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def difference_interval(values: Sequence[float], before: Sequence[float]) -> Interval:
    """Returns the 95% interval of how much the mean of `values`, from 0 to 1, is above that of
    `before`. Both have the scores of the same prompts. The share of gains and the share of losses
    have an interval of 97.5% each."""
    changes = [after - other for after, other in zip(values, before, strict=True)]
    gain = mean_interval([max(change, 0.0) for change in changes], Z_97_5)
    loss = mean_interval([max(-change, 0.0) for change in changes], Z_97_5)
    return Interval(gain.value - loss.value, gain.low - loss.high, gain.high - loss.low)


@dataclass(frozen=True)
class Confirmed:
    """Settings of the front, with their results on prompts that the search has not used."""

    tried: Tried
    measured: Measured
    accuracy: Interval
    difference: Interval
    """How much the accuracy is above that of the checkpoint's own settings; as a share of 1."""

    @classmethod
    def compared_with(
        cls, own_scores: Sequence[float], tried: Tried, measured: Measured
    ) -> "Confirmed":
        """Returns the settings `tried` with their results `measured`, compared with the scores of
        the checkpoint's own settings for the same prompts, in the same order."""
        accuracy = mean_interval(measured.scores)
        return cls(tried, measured, accuracy, difference_interval(measured.scores, own_scores))


def choose_settings(confirmed: Sequence[Confirmed], max_loss: float) -> Confirmed:
    """Returns the fastest settings whose accuracy is at most `max_loss`, a share of 1, below that
    of the checkpoint's own. `confirmed` must have the checkpoint's own settings."""
    good = [c for c in confirmed if c.tried.is_own or c.difference.value >= -max_loss]
    return max(good, key=lambda c: (c.measured.tokens_per_forward, -c.tried.number))


@dataclass(frozen=True)
class Findings:
    """The result of a search."""

    tried: Sequence[Tried]
    confirmed: Sequence[Confirmed]  # by rising tokens per forward
    chosen: Confirmed  # the settings that are written for `vllm serve`
    prompts: str  # says which prompts the settings were confirmed on

    @property
    def own(self) -> Confirmed:
        """The checkpoint's own settings."""
        return next(c for c in self.confirmed if c.tried.is_own)


def as_table(findings: Findings) -> Table:
    """Returns a table with a row for each of the confirmed settings, in their order."""
    table = Table(
        box=SIMPLE_HEAD,
        caption=f"On {findings.prompts}. In brackets: 95% intervals, each for itself. * is "
        f"written.",
        caption_justify="left",
    )
    table.add_column("trial")
    for heading in ("accuracy, %", "difference, points", "tokens/\nforward", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("settings", overflow="fold")
    for row in findings.confirmed:
        keys = (
            f"{key.removeprefix('diffusion_')} {value:{'.3g' if isinstance(value, float) else ''}}"
            for key, value in row.tried.keys.items()
        )
        table.add_row(
            f"{row.tried.number}{' *' if row is findings.chosen else ''}",
            _format_interval(row.accuracy),
            "-" if row.tried.is_own else _format_interval(row.difference, "+"),
            f"{row.measured.tokens_per_forward:.2f}",
            f"{row.measured.tokens_per_second:.0f}",
            "own settings" if row.tried.is_own else ", ".join(keys),
        )
    return table


def _format_interval(interval: Interval, sign: str = "") -> str:
    """Returns an interval in percent, as `61.2 (58.0 to 64.3)`. With "+" as `sign`, positive
    numbers have a sign, too."""
    return (
        f"{100 * interval.value:{sign}.1f} "
        f"({100 * interval.low:{sign}.1f} to {100 * interval.high:{sign}.1f})"
    )


def write_defaults(path: Path, extension: dict[str, Any], findings: Findings) -> None:
    """Writes a file for `vllm serve --config` with the extension's settings `extension`. Comments
    in it say how they were found, and how they compare with the checkpoint's own."""
    chosen = findings.chosen
    lines = [
        f"Made by: {command()}",
        f"On {findings.prompts}: accuracy {_format_interval(chosen.accuracy)} %, 95% interval in "
        f"brackets;",
        f"{_format_interval(chosen.difference, '+')} points beside the checkpoint's own settings.",
        f"{chosen.measured.tokens_per_forward:.2f} tokens a forward; the checkpoint's own: "
        f"{findings.own.measured.tokens_per_forward:.2f}.",
        f"vllm serve CHECKPOINT --config {path.name}",
    ]
    section = yaml.safe_dump({"additional-config": {"vllm_dllm": extension}}, sort_keys=False)
    path.write_text("".join(f"# {line}\n" for line in lines) + section)


def as_json(findings: Findings, setting: dict[str, Any]) -> str:
    """Returns the contents of tune.json: the command, `setting`, all trials and the confirmed
    settings."""

    def describe_trial(trial: Tried, measured: Measured) -> dict[str, Any]:
        """Returns what the file says of one trial, with the results `measured`."""
        return {
            "trial": trial.number,
            "own": trial.is_own,
            "keys": dict(trial.keys),
            "accuracy": measured.accuracy,
            "tokens_per_forward": measured.tokens_per_forward,
            "tokens_per_second": measured.tokens_per_second,
            "tokens": measured.tokens,
            "forwards": measured.forwards,
        }

    content = {
        "command": command(),
        **setting,
        "searched": [describe_trial(t, t.measured) for t in findings.tried],
        "confirmed": [
            describe_trial(c.tried, c.measured)
            | {
                "accuracy_95": [c.accuracy.low, c.accuracy.high],
                "difference": c.difference.value,
                "difference_95": [c.difference.low, c.difference.high],
                "chosen": c is findings.chosen,
            }
            for c in findings.confirmed
        ],
    }
    return json.dumps(content, indent=1) + "\n"


PANELS: list[tuple[str, Callable[[Measured], float]]] = [
    ("tokens per forward", lambda measured: measured.tokens_per_forward),
    ("tokens per second, here", lambda measured: measured.tokens_per_second),
]


def save_plot(findings: Findings, title: str, path: Path) -> None:
    """Writes a picture to `path` with every trial of the search, and the confirmed settings'
    results on the prompts that the search has not used."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (label, speed) in zip(panels, PANELS, strict=True):
        axes.scatter(
            [speed(t.measured) for t in findings.tried],
            [100 * t.measured.accuracy for t in findings.tried],
            color="0.75",
            label="trials, on the prompts of the search",
        )
        ordered = sorted(findings.confirmed, key=lambda c: speed(c.measured))
        axes.errorbar(
            [speed(c.measured) for c in ordered],
            [100 * c.accuracy.value for c in ordered],
            (
                [100 * (c.accuracy.value - c.accuracy.low) for c in ordered],
                [100 * (c.accuracy.high - c.accuracy.value) for c in ordered],
            ),
            fmt="o-",
            capsize=3,
            label="the front, on the other prompts, 95%",
        )
        for marked, marker, name in (
            (findings.own, "s", "the checkpoint's own settings"),
            (findings.chosen, "*", "written to defaults.yaml"),
        ):
            x, y = speed(marked.measured), 100 * marked.accuracy.value
            axes.scatter([x], [y], marker=marker, s=130, zorder=3, label=name)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy, %")
    panels[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)
