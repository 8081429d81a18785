"""Options of the commands that ask a server the prompts of tasks: `eval` and `tune`."""

import argparse
import shlex
import sys
from pathlib import Path


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """`--data`, `--api`, `--limit`, `--concurrency` and `--serve-options`."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("."),
        metavar="FOLDER",
        help="folder of the tasks' data sets, each in OWNER/NAME (default: %(default)s). For task "
        "files, their own folder is searched first; for tasks given by name, also Hugging Face's "
        "cache. Nothing is downloaded",
    )
    parser.add_argument(
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="whether prompts go through the chat template (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N prompts of each task only")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=32,
        metavar="N",
        help="prompts at once (default: %(default)s)",
    )
    parser.add_argument(
        "--serve-options",
        type=shlex.split,
        metavar="OPTIONS",
        help="for `vllm serve`, as one string: --serve-options='--dtype float32' (default: none; "
        "without a GPU --kv-cache-memory-bytes 1G and a --max-model-len that fits the tasks)",
    )


def say_what_is_missing(command: str, error: ModuleNotFoundError) -> None:
    """Names the extra that has the package. Raises `error` if no extra of ours has it."""
    package = str(error.name).partition(".")[0]
    if package not in ("datasets", "lm_eval", "optuna"):
        raise error
    print(
        f"vllm-dllm {command}: there is no {package} here: pip install 'vllm-dllm[eval]'",
        file=sys.stderr,
    )
