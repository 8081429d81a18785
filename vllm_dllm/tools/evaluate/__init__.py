"""`vllm-dllm eval`: how accurate, fast and large checkpoints are when served.

Each checkpoint gets its own `vllm serve`, one after the other; lm-evaluation-harness sends it the
tasks' prompts over HTTP, like any client.
"""

import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.harness import evaluate
from vllm_dllm.tools.evaluate.plot import plot
from vllm_dllm.tools.evaluate.report import Row
from vllm_dllm.tools.evaluate.server_numbers import Counters, read_metrics, read_weight_bytes
from vllm_dllm.tools.evaluate.serving import quiet, serve_options, served
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.progress import progress_bars
from vllm_dllm.tools.server_process import check_checkpoint

__all__ = ["Settings", "run"]


HELD_OUT = "checkpoints/held_out.yaml"
PIPE_COLUMNS = 110  # of the table, if the output is not a terminal


@dataclass(frozen=True)
class Settings:
    tasks: Sequence[str] | None
    """Task files, or task names of lm-evaluation-harness; None for `HELD_OUT`."""
    data: Path
    """Folder of data sets, each in OWNER/NAME."""
    api: str
    """`chat` or `completions`."""
    limit: int | None
    """Prompts per task; None for all."""
    concurrency: int
    """Prompts at once."""
    serve_options: Sequence[str] | None
    """Further options for `vllm serve`; None for those of `serving.serve_options`."""
    out: Path
    """Folder for eval.json and eval.png."""


def run(checkpoints: Sequence[Path], **options: Any) -> None:
    """Prints a table, and writes it with a plot to `out`. The options are the fields of `Settings`.

    Raises:
        InputError, ServerError: say what went wrong and what to do.
    """
    settings = Settings(**options)
    _check(checkpoints, settings)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    logs = Path(tempfile.mkdtemp(prefix="vllm-dllm-eval-"))
    with quiet(logs / "lm_eval.log"):
        tasks = load_tasks(settings.tasks or [HELD_OUT], settings.data)
        settings = replace(settings, serve_options=serve_options(tasks, settings.serve_options))
        rows: list[Row] = []
        for checkpoint in checkpoints:
            rows += _evaluate_checkpoint(checkpoint, tasks, settings, console, logs)
    table = report.with_recovery(rows)
    asked = report.asked(table, settings.concurrency)
    console.print(report.as_table(table, asked))
    machine = report.machine()
    report.save(table, settings, machine, settings.out / "eval.json")
    plot(table, f"{asked}; {machine['device']}", settings.out / "eval.png")
    console.print(f"{settings.out / 'eval.json'}, {settings.out / 'eval.png'}", soft_wrap=True)


def _check(checkpoints: Sequence[Path], settings: Settings) -> None:
    for checkpoint in checkpoints:
        check_checkpoint(checkpoint)
    if len(set(checkpoints)) < len(checkpoints):
        raise InputError("a checkpoint is named twice: name each one once")
    for name, number in (("limit", settings.limit), ("concurrency", settings.concurrency)):
        if number is not None and number < 1:
            raise InputError(f"--{name} must be at least 1, got {number}")
    if not settings.data.is_dir():
        raise InputError(f"--data: there is no folder '{settings.data}'")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # now, not after everything has been measured
        raise InputError(f"-o must name a folder that can be written: {error}") from error


def _evaluate_checkpoint(
    checkpoint: Path, tasks: dict[str, Task], settings: Settings, console: Console, logs: Path
) -> Iterator[Row]:
    with served(checkpoint, settings.serve_options or (), console, logs) as port:
        weight_bytes = read_weight_bytes(port)
        for name, task in tasks.items():
            before = read_metrics(port)
            with progress_bars(console) as progress:
                num_prompts = min(len(task.eval_docs), settings.limit or len(task.eval_docs))
                bar = progress.add_task(name, total=num_prompts)
                outcome = evaluate(
                    task,
                    str(checkpoint),
                    port,
                    api=settings.api,
                    concurrency=settings.concurrency,
                    limit=settings.limit,
                    log=logs / "lm_eval.log",
                    on_answer=functools.partial(progress.advance, bar),
                )
            console.print(f"{name}: {outcome.num_prompts} prompts, {outcome.seconds:.0f} s")
            done = Counters.since(before, port)
            yield from report.rows(checkpoint, name, outcome, done, weight_bytes)
