"""`vllm-dllm eval`: measures how accurate, fast and large checkpoints are when they are served.

Each checkpoint is served by its own `vllm serve`, one after the other. lm-evaluation-harness sends
it the tasks' prompts over HTTP, like any client.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.task import Task
from rich.console import Console

from vllm_dllm.errors import InputError
from vllm_dllm.tools.evaluate import report
from vllm_dllm.tools.evaluate.harness import (
    Outcome,
    PromptSettings,
    evaluate,
    redirect_library_logs,
)
from vllm_dllm.tools.evaluate.report import Row, describe_machine, save_plot
from vllm_dllm.tools.evaluate.tasks import load_tasks, longest_answer
from vllm_dllm.tools.scrape import SERVER_ENVIRONMENT, SERVER_OPTIONS, post_json, read_weight_bytes
from vllm_dllm.tools.server_process import (
    ENDING_SECONDS,
    HOST,
    Server,
    check_checkpoint,
    choose_port,
    log_folder,
    serve_command,
)
from vllm_dllm.tools.terminal import make_console, print_table, progress_bars, wait_on_console

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
        serve_options = choose_serve_options(loaded, prompting.serve_options)
        prompting = replace(prompting, serve_options=serve_options)
        for checkpoint in checkpoints:
            with run_server(checkpoint, serve_options, console, logs) as port:
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


CONTEXT = 1024  # tokens; enough for held-out prompts and their answers


def choose_serve_options(
    tasks: dict[str, Task], user_options: Sequence[str] | None
) -> Sequence[str]:
    """Returns the options of `vllm serve`: `user_options`, or defaults if that is None. Raises
    InputError if their context leaves no room for the longest answer that a task asks for."""
    longest = max(tasks, key=lambda name: longest_answer(tasks[name]))
    tokens = longest_answer(tasks[longest])
    if user_options is None:
        return _default_options(tokens)
    context = re.search(r"--max-model-len[ =](\d+)(?!\S)", " ".join(user_options))
    if context and int(context[1]) <= tokens:
        raise InputError(
            f"task '{longest}' asks for answers of up to {tokens} tokens (max_gen_toks): "
            f"--max-model-len must leave room for them after the prompt, got {context[1]}. Raise "
            f"it, or lower max_gen_toks in a task file."
        )
    return user_options


def _default_options(longest_answer: int) -> list[str]:
    """Returns no options on a GPU. On a CPU, returns a limit of the KV cache, which by default
    takes most of the memory, and of the context. The context has room for answers of
    `longest_answer` tokens."""
    if torch.cuda.is_available():
        return []
    context = CONTEXT if longest_answer <= CONTEXT // 2 else longest_answer + CONTEXT
    return ["--max-model-len", str(context), "--kv-cache-memory-bytes", "1G"]


@contextmanager
def run_server(
    checkpoint: Path, options: Sequence[str], console: Console, logs: Path
) -> Iterator[int]:
    """Serves the checkpoint, with further `options` of `vllm serve`, for the length of a block.
    Yields the port once the server has answered a first request. Its log goes to the folder `logs`.
    Errors of the block are passed on.

    Raises:
        ServerError: the server did not start, or has ended when the first request or the block
            raises InputError.
        InputError: the first request failed.
    """
    port = choose_port(None)
    log = logs / f"{checkpoint.resolve().name}-{port}.log"
    console.print(f"Serving {checkpoint}, log: {log}", soft_wrap=True)
    command = serve_command(checkpoint, port, *SERVER_OPTIONS, *options)
    ask_without_proxy()
    with Server(command, port, log, SERVER_ENVIRONMENT) as server:
        seconds = wait_on_console(server, console)
        console.print(f"Ready after {seconds:.0f} s.")
        try:
            # So that the costs of its first request are not measured.
            first = {"model": str(checkpoint), "prompt": "Hello", "max_tokens": 16}
            post_json(port, "/v1/completions", first)
            yield port
        except InputError:
            server.check_alive(ENDING_SECONDS)  # raises, if that was the reason
            raise


def ask_without_proxy() -> None:
    """Lets this process ask servers on `HOST` directly, as long as it lives. The harness would ask
    a proxy, if the environment names one."""
    # Where both are set, `no_proxy` alone counts.
    inherited = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
    os.environ["no_proxy"] = ",".join(filter(None, (inherited, HOST)))
