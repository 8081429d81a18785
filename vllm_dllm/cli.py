"""The command `vllm-dllm`: reads the command line and calls the module that does the work."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

from vllm_dllm.errors import InputError, ServerError
from vllm_dllm.tools.commands import COMMANDS, GROUPS, Command

EVAL_PACKAGES = ("datasets", "lm_eval", "optuna")  # of the extra `eval`
CONTINUES = "the same command continues from here"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sub-command that `argv` names, or the process' own command line if it is None.
    Returns the exit status: 0, 1 after an error of the user's, 130 after Ctrl-C (0 in `top`). Such
    an error is printed in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding without "τ" or box characters
    options = vars(_make_parser().parse_args(argv))
    name: str = options.pop("command")
    command: Command = options.pop("what")
    try:
        resolve_name(command.work)(**options)
        print(end="", flush=True)  # here, errors are reported
    except (InputError, ServerError) as error:
        return _print_error(name, str(error))
    except OSError as error:  # no such folder, no permission, disk full
        _drop_output()
        if isinstance(error, BrokenPipeError):  # whoever read the output has left, as `head` does
            return 1
        remedy = f"; once that is fixed, {CONTINUES}" if command.resumes else ""
        return _print_error(name, f"{error}{remedy}")
    except ModuleNotFoundError as error:
        if (package := str(error.name).partition(".")[0]) not in EVAL_PACKAGES:
            raise
        return _print_error(name, f"there is no {package} here: pip install 'vllm-dllm[eval]'")
    except KeyboardInterrupt:
        if command.resumes:
            _print_error(name, f"stopped; {CONTINUES}")
        return 0 if name == "top" else 130  # that is how one leaves `top`
    return 0


def _drop_output() -> None:
    """Sends standard output nowhere if it cannot be written: Python would try again at the exit."""
    with contextlib.suppress(OSError):
        print(end="", flush=True)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(name: str, message: str) -> int:
    """Prints `message` to standard error, after the name of the sub-command, and returns the exit
    status 1."""
    print(f"vllm-dllm {name}: {message}", file=sys.stderr)
    return 1


def _make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line. It sets `command`, the sub-command's name, and
    `what`, its Command."""
    parser = argparse.ArgumentParser(
        prog="vllm-dllm", description="Tools for serving diffusion language models with vLLM."
    )
    version = f"%(prog)s {metadata.version('vllm-dllm')}"
    parser.add_argument("--version", action="version", version=version)
    kinds: dict[str, Any] = {"title": "commands", "required": True, "metavar": "COMMAND"}
    groups = {"": parser.add_subparsers(**kinds)}
    for name, command in COMMANDS.items():
        group, _, last_word = name.rpartition(" ")
        if group not in groups:
            text = GROUPS[group]
            group_parser = groups[""].add_parser(group, help=text, description=text)
            groups[group] = group_parser.add_subparsers(**kinds)
        subparser = groups[group].add_parser(
            last_word, help=command.text, description=f"{command.text} {command.more}".strip()
        )
        subparser.set_defaults(command=name, what=command)
        for flags, options in command.arguments:
            subparser.add_argument(*flags, **options)
    return parser
