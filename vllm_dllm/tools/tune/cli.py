"""The command line of `vllm-dllm tune`."""

import argparse
from pathlib import Path

from vllm_dllm.tools.resumable import exit_status
from vllm_dllm.tools.task_options import add_task_options, say_what_is_missing


def add_tune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Search for settings that answer a task sooner and as well; write them for `vllm serve`."
    parser = commands.add_parser("tune", help=text, description=text)
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument(
        "--task",
        required=True,
        metavar="NAME|FILE.yaml",
        help="task of lm-evaluation-harness, such as gsm8k, or a task file. Half of its prompts "
        "are searched with, half judge what was found",
    )
    add_task_options(parser)
    parser.add_argument(
        "--trials",
        type=int,
        default=50,
        metavar="N",
        help="settings to try, the checkpoint's own first (default: %(default)s)",
    )
    parser.add_argument(
        "--max-loss",
        type=float,
        default=0.5,
        metavar="POINTS",
        help="of accuracy, in percentage points, that speed may cost (default: %(default)s)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("tuning"),
        metavar="FOLDER",
        help="where defaults.yaml, tune.json and tune.png are written; must not exist (default: "
        "%(default)s). A stopped run continues when the command is repeated",
    )
    parser.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    try:
        from vllm_dllm.tools.tune.run import Settings, run  # late: it loads PyTorch and the harness
    except ModuleNotFoundError as error:
        say_what_is_missing("tune", error)
        return 1

    settings = Settings(
        task=options.task,
        data=options.data,
        api=options.api,
        limit=options.limit,
        trials=options.trials,
        max_loss=options.max_loss / 100,
        concurrency=options.concurrency,
        serve_options=options.serve_options,
        out=options.out,
    )
    return exit_status("tune", lambda: run(options.checkpoint, settings))
