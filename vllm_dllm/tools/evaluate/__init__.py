"""`vllm-dllm eval`: measures how accurate, fast and large checkpoints are when they are served.

Each checkpoint is served by its own `vllm serve`, one after the other. lm-evaluation-harness sends
it the tasks' prompts over HTTP, like any client.
"""

import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.harness import PromptSettings, evaluate
from vllm_dllm.tools.evaluate.report import Row, save_plot
from vllm_dllm.tools.evaluate.serving import redirect_library_logs, run_server, serve_options
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.resumable import progress_bars
from vllm_dllm.tools.scrape import Counters, read_metrics, read_weight_bytes
from vllm_dllm.tools.server_process import check_checkpoint

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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    logs = Path(tempfile.mkdtemp(prefix="vllm-dllm-eval-"))
    with redirect_library_logs(logs / "lm_eval.log"):
        loaded = load_tasks(tasks or [HELD_OUT], prompting.data)
        prompting = replace(prompting, serve_options=serve_options(loaded, prompting.serve_options))
        rows: list[Row] = []
        for checkpoint in checkpoints:
            serving = prompting.serve_options or ()
            with run_server(checkpoint, serving, console, logs) as port:
                weight_bytes = read_weight_bytes(port)
                for name, task in loaded.items():
                    before = read_metrics(port)
                    with progress_bars(console) as progress:
                        count = min(len(task.eval_docs), prompting.limit or len(task.eval_docs))
                        bar = progress.add_task(name, total=count)
                        outcome = evaluate(
                            task,
                            str(checkpoint),
                            port,
                            prompting,
                            log=logs / "lm_eval.log",
                            on_answer=functools.partial(progress.advance, bar),
                        )
                    console.print(f"{name}: {outcome.num_prompts} prompts, {outcome.seconds:.0f} s")
                    done = Counters.since(before, port)
                    rows += report.make_rows(checkpoint, name, outcome, done, weight_bytes)
    table = report.with_recovery(rows)
    asked = report.describe_prompts(table, prompting.concurrency)
    console.print(report.make_table(table, asked))
    machine = report.describe_machine()
    report.save_json(table, prompting, machine, out / "eval.json")
    save_plot(table, f"{asked}; {machine['device']}", out / "eval.png")
    console.print(f"{out / 'eval.json'}, {out / 'eval.png'}", soft_wrap=True)


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
