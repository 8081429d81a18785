"""`vllm-dllm eval`: measures how accurate, fast and large checkpoints are when they are served.

Each checkpoint is served by its own `vllm serve`, one after the other. lm-evaluation-harness sends
it the tasks' prompts over HTTP, like any client.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate import report, serving
from vllm_dllm.tools.evaluate.harness import (
    Outcome,
    PromptSettings,
    evaluate,
    redirect_library_logs,
)
from vllm_dllm.tools.evaluate.report import Row, describe_machine, save_plot
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.scrape import read_weight_bytes
from vllm_dllm.tools.server_process import check_checkpoint, log_folder
from vllm_dllm.tools.terminal import make_console, print_table, progress_bars

__all__ = ["run"]

HELD_OUT = "checkpoints/held_out.yaml"  # from the current folder
PIPE_COLUMNS = 110  # width of the table if the output is not a terminal


def run(
    checkpoints: Sequence[Path],
    tasks: Sequence[str] | None,  # files, or names in lm-evaluation-harness; None: `HELD_OUT`
    out: Path,  # folder for eval.json and eval.png
    **options: Any,
) -> None:
    """Evaluates the checkpoints, prints a table, and writes it with a plot to `out`. `options` are
    the fields of `PromptSettings`.

    Raises:
        InputError, ServerError: an option cannot be used, or a server failed.
    """
    prompting = PromptSettings(**options)
    _check_options(checkpoints, prompting, out)
    console = make_console(PIPE_COLUMNS)
    rows: list[Row] = []
    with log_folder("eval") as logs:
        redirect_library_logs(logs)
        loaded = load_tasks(tasks or [HELD_OUT], prompting.data)
        serve_options = serving.serve_options(loaded, prompting.serve_options)
        prompting = replace(prompting, serve_options=serve_options)
        for checkpoint in checkpoints:
            with serving.run_server(checkpoint, serve_options, console, logs) as port:
                weight_bytes = read_weight_bytes(port)
                for name, task in loaded.items():
                    outcome = _evaluate_task(task, checkpoint, port, prompting, console, logs)
                    rows += report.make_rows(checkpoint, name, outcome, weight_bytes)
    table = report.with_recovery(rows)
    prompts = report.describe_prompts(table, prompting.concurrency)
    print_table(console, report.make_table(table, prompts))
    machine = describe_machine()
    report.save_json(table, prompting, machine, out / "eval.json")
    save_plot(table, f"{prompts}; {machine['device']}", out / "eval.png")
    console.print(f"{out / 'eval.json'}, {out / 'eval.png'}", soft_wrap=True)


def _evaluate_task(
    task: Task, checkpoint: Path, port: int, prompting: PromptSettings, console: Console, logs: Path
) -> Outcome:
    """Returns the result of a task on the server at `port`. Shows a bar meanwhile, and then a
    line."""
    with progress_bars(console) as progress:
        bar = progress.add_task(task.task_name, total=prompting.count_prompts(task))
        outcome = evaluate(
            task,
            str(checkpoint),
            port,
            prompting,
            logs=logs,
            on_answer=lambda: progress.advance(bar),
        )
    console.print(f"{task.task_name}: {outcome.num_prompts} prompts, {outcome.seconds:.0f} s")
    return outcome


def _check_options(checkpoints: Sequence[Path], prompting: PromptSettings, out: Path) -> None:
    """Makes the folder `out`. Raises InputError or ServerError for options that cannot be used."""
    for checkpoint in checkpoints:
        check_checkpoint(checkpoint)
    if len(set(checkpoints)) < len(checkpoints):
        raise InputError("a checkpoint is named twice: name each one once")
    prompting.check()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # now, not after everything has been measured
        raise InputError(f"-o must name a folder that can be written: {error}") from error
