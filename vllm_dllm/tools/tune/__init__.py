"""`vllm-dllm tune`: searches for settings that answer a task sooner and as well.

One server answers the task's prompts again and again, each time with other `diffusion_*` keys,
which Optuna chooses. One half of the prompts is for the search. The settings that no others beat in
both accuracy and speed are then tried on the other half, so that luck in the search does not count.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from lm_eval.api.task import Task
from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.evaluate.harness import PromptSettings, evaluate
from vllm_dllm.tools.evaluate.report import describe_machine, sha256_sums
from vllm_dllm.tools.evaluate.serving import redirect_library_logs, run_server, serve_options
from vllm_dllm.tools.evaluate.tasks import load_tasks
from vllm_dllm.tools.resumable import progress_bars
from vllm_dllm.tools.scrape import Counters, read_metrics
from vllm_dllm.tools.server_process import check_checkpoint
from vllm_dllm.tools.tune import report
from vllm_dllm.tools.tune.report import Confirmed, choose_settings, plot
from vllm_dllm.tools.tune.search import Measured, Tried, pareto_front, search
from vllm_dllm.tools.tune.space import Space, Value

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
    asked = asdict(settings)
    del asked["trials"], asked["max_loss"], asked["out"]  # may differ when a stopped run continues
    marks = resumable.file_marks(sorted(checkpoint.glob("*.safetensors")))
    identity = {"checkpoint": str(checkpoint), "weights": marks} | asked
    identity["data"] = str(settings.data)
    if resumable.is_finished(settings.out, identity, WORKING_FILES):
        return
    partial = resumable.partial_folder(settings.out)
    resumable.is_resumed(partial, identity, "checkpoint, task or options")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    logs = Path(tempfile.mkdtemp(prefix="vllm-dllm-tune-"))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with redirect_library_logs(logs / "lm_eval.log"):
        task, *halves = _load(settings)
        serving = serve_options({settings.task: task}, settings.serve_options)
        if own := space.server_settings:
            serving = [*serving, "--additional-config", json.dumps({"vllm_dllm": own})]
        resumable.start_run(partial, identity)
        with run_server(checkpoint, serving, console, logs) as port:
            measure = _measure(task, str(checkpoint), port, settings, logs / "lm_eval.log")
            tried, confirmed = _search_and_confirm(
                partial, space, halves, settings, measure, console
            )
    _write(partial, checkpoint, space, settings, tried, confirmed, console)
    resumable.finish_run(partial, settings.out, WORKING_FILES)
    console.print(f"vllm serve {checkpoint} --config {settings.out}/defaults.yaml", soft_wrap=True)


def _load(settings: Settings) -> tuple[Task, Sequence[int], Sequence[int]]:
    """Returns the task, the indices of the prompts to search with, and of those to confirm with.
    They alternate, since files are often sorted. Raises InputError if the task cannot be used, has
    too few prompts, or the name stands for several tasks."""
    tasks = load_tasks([settings.task], settings.data)
    if len(tasks) > 1:
        raise InputError(
            f"--task must be one task, got '{settings.task}' with {len(tasks)}: {', '.join(tasks)}"
        )
    (task,) = tasks.values()
    count = min(len(task.eval_docs), settings.limit or len(task.eval_docs))
    if count < LEAST_PROMPTS:
        raise InputError(
            f"task '{task.task_name}' must have at least {LEAST_PROMPTS} prompts, got {count}"
        )
    return task, range(0, count, 2), range(1, count, 2)


def _measure(task: Task, model: str, port: int, settings: Settings, log: Path) -> Measure:
    """Returns a function that sends prompts with certain keys to the server at `port`, and measures
    the answers. It raises InputError if the task's first metric is not from 0 to 1."""

    def measure(prompts: Sequence[int], keys: Mapping[str, Value]) -> Measured:
        """Sends the prompts, with `keys` in each request, and returns what the server did."""
        before = read_metrics(port)
        outcome = evaluate(
            task,
            model,
            port,
            settings,
            log=log,
            on_answer=lambda: None,
            prompts=prompts,
            options=keys,
        )
        done = Counters.since(before, port)
        score = outcome.scores[0]
        scores = tuple(score_of(score.by_prompt.get(prompt), score.name) for prompt in prompts)
        return Measured(scores, done.tokens, done.forwards, outcome.seconds)

    def score_of(value: object, name: str) -> float:
        """Returns the score of one answer. Raises InputError unless it is a number from 0 to 1."""
        if isinstance(value, (int, float)) and 0 <= value <= 1:
            return float(value)
        raise InputError(
            f"task '{task.task_name}' must score each answer from 0 to 1, got {value!r} for its "
            f"first metric, {name}. Put another first in a task file."
        )

    return measure


def _search_and_confirm(
    partial: Path,
    space: Space,
    halves: Sequence[Sequence[int]],  # indices of prompts: to search with, and to confirm with
    settings: Settings,
    measure: Measure,
    console: Console,
) -> tuple[list[Tried], list[Confirmed]]:
    """Tries settings on the first half of the prompts, and the best of them on the second half.
    Prints each trial. Returns all trials, and the confirmed ones by rising tokens per forward."""

    def say(tried: Tried) -> None:
        """Prints a finished trial, and moves the bar on."""
        found = tried.measured
        console.print(
            f"{tried.number:4d}  accuracy {found.accuracy:6.1%}  "
            f"{found.tokens_per_forward:6.2f} tokens/forward  "
            f"{found.tokens_per_second:6.0f} tokens/s  {tried.rule}"
        )
        progress.update(bar, completed=tried.number + 1)

    with progress_bars(console) as progress:
        bar = progress.add_task("trials", total=settings.trials)
        tried = search(
            partial / TRIALS_FILE,
            space,
            settings.trials,
            lambda keys: measure(halves[0], keys),
            say,
        )
        own = next(t for t in tried if t.is_own)
        candidates = [own, *(t for t in pareto_front(tried) if t is not own)]
        confirming = progress.add_task("confirming", total=len(candidates))
        file, found = partial / CONFIRMED_FILE, []
        known: dict[str, Any] = resumable.read_json(file) if file.exists() else {}
        for candidate in candidates:
            if (key := str(candidate.number)) not in known:
                known[key] = asdict(measure(halves[1], candidate.keys))
                resumable.write_json(file, known)
            found.append(Measured.from_json(known[key]))
            progress.advance(confirming)
    confirmed = [
        Confirmed.compared_with(found[0], candidate, measured)
        for candidate, measured in zip(candidates, found, strict=True)
    ]
    return tried, sorted(confirmed, key=lambda c: c.measured.tokens_per_forward)


def _write(
    partial: Path,
    checkpoint: Path,
    space: Space,
    settings: Settings,
    tried: Sequence[Tried],
    confirmed: Sequence[Confirmed],
    console: Console,
) -> None:
    """Chooses the settings, prints the table, and writes defaults.yaml, tune.json and tune.png into
    `partial`."""
    chosen = choose_settings(confirmed, settings.max_loss / 100)
    own = next(c for c in confirmed if c.tried.is_own)
    here = describe_machine()
    prompts = f"{len(own.measured.scores)} prompts of {settings.task}"
    console.print(report.as_table(confirmed, chosen, prompts))
    extension = space.settings_for(chosen.tried.keys)
    report.write_defaults(partial / "defaults.yaml", extension, chosen, own.measured, prompts)
    asked = {
        "checkpoint": str(checkpoint),
        "weights": sha256_sums(checkpoint),
        "machine": here,
        "concurrency": settings.concurrency,
        "max_loss": settings.max_loss / 100,
    }
    (partial / "tune.json").write_text(report.as_json(tried, confirmed, chosen, asked))
    title = f"{checkpoint.name}: {len(tried)} trials, {prompts}; {here['device']}"
    plot(tried, confirmed, chosen, title, partial / "tune.png")
