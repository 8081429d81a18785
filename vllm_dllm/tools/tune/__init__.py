"""`vllm-dllm tune`: searches for settings that answer a task sooner and as well.

One server answers the task's prompts again and again, each time with other `diffusion_*` keys,
which Optuna chooses. One half of the prompts is for the search. The settings that no others beat in
both accuracy and speed are then tried on the other half, so that luck in the search does not count.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from lm_eval.api.task import Task
from rich.progress import Progress

from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.evaluate import choose_serve_options, run_server
from vllm_dllm.tools.evaluate.harness import PromptSettings, evaluate, redirect_library_logs
from vllm_dllm.tools.evaluate.report import describe_machine, sha256_sums
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.server_process import check_checkpoint, log_folder
from vllm_dllm.tools.terminal import make_console, print_table, progress_bars
from vllm_dllm.tools.tune import report
from vllm_dllm.tools.tune.report import Confirmed, Findings, choose_settings
from vllm_dllm.tools.tune.search import Measured, Space, Tried, Value, pareto_front, search

LEAST_PROMPTS = 8  # of a task, for both halves together
WORKING_FILES = TRIALS_FILE, CONFIRMED_FILE = "trials.log", "confirmed.json"
PIPE_COLUMNS = 150  # width of the table if the output is not a terminal
Measure = Callable[[Sequence[int], Mapping[str, Value]], Measured]
"""(indices of prompts, keys of each request) -> what the server did with them."""


@dataclass(frozen=True, kw_only=True)
class Settings(PromptSettings):
    """The options of `vllm-dllm tune`."""

    task: str
    """A task file, or the name of a task of lm-evaluation-harness."""
    trials: int
    """How many settings to try, the checkpoint's own among them."""
    max_loss: float
    """The accuracy may be this much below that of the checkpoint's own settings, in percentage
    points."""
    out: Path
    """The folder to write; it must not exist."""


def run(checkpoint: Path, **options: Any) -> None:
    """Writes defaults.yaml, tune.json and tune.png to `out`, and prints a table. `options` are the
    fields of `Settings`.

    Raises:
        InputError, ServerError: an option cannot be used, or the server failed.
    """
    settings = Settings(**options)
    check_checkpoint(checkpoint)
    settings.check(LEAST_PROMPTS)
    if settings.trials < 1:
        raise InputError(f"--trials must be at least 1, got {settings.trials}")
    if not 0 <= settings.max_loss < 100:
        raise InputError(
            f"--max-loss must be in points from 0 to below 100, got {settings.max_loss:g}"
        )
    space = Space(checkpoint, settings.serve_options or ())
    run = _resumable_run(checkpoint, settings)
    if run.is_finished():
        return
    console = make_console(PIPE_COLUMNS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with log_folder("tune") as logs:
        redirect_library_logs(logs)
        task = _load_task(settings)
        serve_options = choose_serve_options({settings.task: task}, settings.serve_options)
        if own := space.server_settings:
            serve_options = [*serve_options, "--additional-config", json.dumps({"vllm_dllm": own})]
        run.start()
        with (
            run_server(checkpoint, serve_options, console, logs) as port,
            progress_bars(console) as progress,
        ):
            measure = _make_measure(task, str(checkpoint), port, settings, logs)
            # Prompts alternate between search and confirmation, since files are often sorted.
            count = settings.count_prompts(task)
            tried = _search(
                run.partial, space, settings.trials, partial(measure, range(0, count, 2)), progress
            )
            confirmed = _confirm(run.partial, tried, partial(measure, range(1, count, 2)), progress)
    chosen = choose_settings(confirmed, settings.max_loss / 100)
    prompts = f"{count // 2} prompts of {settings.task}"
    findings = Findings(tried, confirmed, chosen, prompts)
    print_table(console, report.as_table(findings))
    _write_files(run.partial, checkpoint, space, settings, findings)
    run.finish()
    console.print(f"vllm serve {checkpoint} --config {settings.out}/defaults.yaml", soft_wrap=True)


def _resumable_run(checkpoint: Path, settings: Settings) -> resumable.Run:
    """Returns the run, which a later command with the same checkpoint, task and options continues.
    The number of trials and the loss may differ then."""
    identity = {"checkpoint": str(checkpoint), "weights": resumable.weight_marks(checkpoint)}
    identity |= asdict(settings) | {"data": str(settings.data)}
    for name in ("trials", "max_loss", "out"):
        del identity[name]
    return resumable.Run(settings.out, identity, "checkpoint, task or options", WORKING_FILES)


def _load_task(settings: Settings) -> Task:
    """Returns the task. Raises InputError if it cannot be used, has too few prompts, or its name
    stands for several tasks."""
    tasks = load_tasks([settings.task], settings.data)
    if len(tasks) > 1:
        raise InputError(
            f"--task must be one task, got '{settings.task}' with {len(tasks)}: {', '.join(tasks)}"
        )
    (task,) = tasks.values()
    if (count := settings.count_prompts(task)) < LEAST_PROMPTS:
        raise InputError(
            f"task '{task.task_name}' must have at least {LEAST_PROMPTS} prompts, got {count}"
        )
    return task


def _make_measure(task: Task, model: str, port: int, settings: Settings, logs: Path) -> Measure:
    """Returns a function that sends prompts with certain keys to the server at `port`, and measures
    the answers. It raises InputError if the task's first metric is not from 0 to 1."""

    def measure(prompts: Sequence[int], keys: Mapping[str, Value]) -> Measured:
        """Sends the prompts, with `keys` in each request, and returns what the server did."""
        outcome = evaluate(task, model, port, settings, logs=logs, prompts=prompts, options=keys)
        score = outcome.scores[0]
        return Measured(
            scores=[check_score(score.by_prompt.get(prompt), score.name) for prompt in prompts],
            tokens=outcome.counters.tokens,
            forwards=outcome.counters.forwards,
            seconds=outcome.seconds,
        )

    def check_score(value: object, name: str) -> float:
        """Returns the score of one answer. Raises InputError unless it is a number from 0 to 1."""
        if isinstance(value, (int, float)) and 0 <= value <= 1:
            return float(value)
        raise InputError(
            f"task '{task.task_name}' must score each answer from 0 to 1, got {value!r} for its "
            f"first metric, {name}. Put another first in a task file."
        )

    return measure


def _search(
    folder: Path,
    space: Space,
    trials: int,
    measure: Callable[[Mapping[str, Value]], Measured],
    progress: Progress,
) -> list[Tried]:
    """Tries settings until `folder` has `trials` of them, prints each, and returns all."""
    found = []
    searched = search(folder / TRIALS_FILE, space, trials, measure)
    for tried in progress.track(searched, total=trials, description="trials"):
        measured = tried.measured
        progress.console.print(
            f"{tried.number:4d}  accuracy {measured.accuracy:6.1%}  "
            f"{measured.tokens_per_forward:6.2f} tokens/forward  "
            f"{measured.tokens_per_second:6.0f} tokens/s  {tried.rule}"
        )
        found.append(tried)
    return found


def _confirm(
    folder: Path,
    tried: list[Tried],
    measure: Callable[[Mapping[str, Value]], Measured],
    progress: Progress,
) -> list[Confirmed]:
    """Measures the checkpoint's own settings and the best others again, on prompts that the search
    has not used, and returns them by rising tokens per forward. Results are kept in `folder`, and
    those of a stopped run are read from there."""
    own = next(t for t in tried if t.is_own)
    candidates = [own, *(t for t in pareto_front(tried) if t is not own)]
    bar = progress.add_task("confirming", total=len(candidates))
    file = folder / CONFIRMED_FILE
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for candidate in candidates:
        if (key := str(candidate.number)) not in results:
            results[key] = asdict(measure(candidate.keys))
            resumable.write_json(file, results)
        progress.advance(bar)
    own_scores = results[str(own.number)]["scores"]
    confirmed = [
        Confirmed.compared_with(own_scores, candidate, Measured(**results[str(candidate.number)]))
        for candidate in candidates
    ]
    return sorted(confirmed, key=lambda c: c.measured.tokens_per_forward)


def _write_files(
    folder: Path, checkpoint: Path, space: Space, settings: Settings, findings: Findings
) -> None:
    """Writes defaults.yaml, tune.json and tune.png into `folder`."""
    machine = describe_machine()
    extension = space.settings_for(findings.chosen.tried.keys)
    report.write_defaults(folder / "defaults.yaml", extension, findings)
    setting = {
        "checkpoint": str(checkpoint),
        "weights": sha256_sums(checkpoint),
        "machine": machine,
        "concurrency": settings.concurrency,
        "max_loss": settings.max_loss / 100,
    }
    (folder / "tune.json").write_text(report.as_json(findings, setting))
    title = f"{checkpoint.name}: {len(findings.tried)} trials, {findings.prompts}"
    report.save_plot(findings, f"{title}; {machine['device']}", folder / "tune.png")
