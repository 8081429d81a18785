"""Ends a failed start with one line that says why.

Tracebacks come before it where `VLLM_LOGGING_LEVEL` is set, or where the program is not `vllm
serve`.

vLLM's engine runs in child processes. A child that cannot start logs its exception, and the process
that the user started ends with "Engine core initialization failed. See root cause above". Here the
child also writes the exception's message to a file, whose name it inherits, and the parent prints
it last.

For a value that an option of `vllm serve` does not take, vLLM's own line shows a function's address
or ends with the address of a page, or it comes after the engine has started and does not name the
option.
"""

import argparse
import atexit
import importlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vllm_dllm.compat import log_lines
from vllm_dllm.config.checks import describe_unknown_name
from vllm_dllm.parents import has_parent

FILE = "DLLM_FIRST_ERROR_FILE"
"""Environment variable with the path of the file that a child writes its first error to."""
WORKERS_S = 5
"""Seconds that the workers of an engine that could not start have to end by themselves."""


def install() -> None:
    """Installs the log handlers that record why a start failed, and in the first process the hook
    that prints the last line. Child processes call it as well. Repeatable."""
    for name in log_lines.FAILED_START:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _FirstError) for handler in logger.handlers):
            logger.addHandler(_FirstError())
    if not has_parent() and not isinstance(sys.excepthook, _LastLine):
        os.environ[FILE] = str(Path(tempfile.gettempdir()) / f"vllm-dllm-{uuid.uuid4()}.error")
        sys.excepthook = _LastLine()
        atexit.register(discard_first_error)  # of an error that the program handled


def shows_tracebacks() -> bool:
    return "VLLM_LOGGING_LEVEL" in os.environ


class _FirstError(logging.Handler):
    """Writes to the file that `FILE` names why a process could not start, unless another process
    wrote it before. Where tracebacks are not wanted, and the file could be written, removes them
    from the log and ends an engine's process, since Python would print its own. Kills the workers
    of an engine after `WORKERS_S`, because its process would wait for them without a limit."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the exception of a record that ends a start, and ignores other records. Raises
        SystemExit in an engine's process if no traceback is to come."""
        error = record.exc_info[1] if record.exc_info else None
        path = os.environ.get(FILE)
        if error is None or path is None or not _ends_start(record):
            return
        # Neither a full disk nor a name that no text can hold must hide the error itself.
        data = one_line(error).encode(errors="backslashreplace")
        is_kept = True
        try:
            with open(path, "xb", opener=_open_for_owner) as file:
                file.write(data)
        except OSError as failure:
            is_kept = isinstance(failure, FileExistsError)
        is_engine = record.name == log_lines.ENGINE and has_parent()
        if is_engine:
            _kill_workers_later()
        if is_kept and not shows_tracebacks():
            record.exc_info = None
            if is_engine:
                raise SystemExit(1)


def _kill_workers_later() -> None:
    """Has this engine's workers killed in `WORKERS_S`. A worker may be in a call that no signal
    ends. And Python drops the SystemExit of vLLM's signal handler if it comes while an object is
    deleted, as thousands are after a failed compilation."""

    def kill() -> None:
        for worker in workers:
            worker.kill()

    workers = multiprocessing.active_children()
    timer = threading.Timer(WORKERS_S, kill)
    timer.daemon = True
    timer.start()


def _ends_start(record: logging.LogRecord) -> bool:
    """Whether a record of a logger in `FAILED_START` is of an exception that ends a start."""
    if record.msg == log_lines.FAILED_CALL and record.exc_info and record.exc_info[1]:
        return log_lines.was_raised_in(log_lines.START_CALLS, record.exc_info[1])
    return record.msg == log_lines.FAILED_START[record.name]


def _open_for_owner(path: str, flags: int) -> int:
    """Opens a file that only its owner can read, and returns its descriptor."""
    return os.open(path, flags, 0o600)


class _LastLine:
    """Takes the place of `sys.excepthook`: prints the line that the user needs after a
    traceback."""

    def __init__(self) -> None:
        self._stock = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Prints the traceback, and then the line. Leaves out the traceback if `vllm serve` failed
        to start, or was told to stop while it started, and nobody asked for tracebacks."""
        is_serving = sys.argv[1:2] == ["serve"]  # else a program of the user's, with its own errors
        is_shown = shows_tracebacks() or not is_serving
        if not is_shown and isinstance(error, KeyboardInterrupt):
            print(log_lines.STOPPED, file=sys.stderr, flush=True)
            return
        if is_shown:
            self._stock(kind, error, traceback)
        line = last_line(error) or (None if is_shown else _describe_unforeseen(error))
        if line:
            print(f"Error: {line}", file=sys.stderr, flush=True)


def last_line(error: BaseException) -> str | None:
    """Returns the line to print after the traceback of `error`. None: the traceback's own end says
    it. If the engine has failed, takes the line that a child left, and deletes its file."""
    if isinstance(error, ValidationError):
        return one_line(error)
    if str(error).startswith(log_lines.ENGINE_FAILED):
        return take_first_error()
    return describe_hub_error(error)


def describe_hub_error(error: BaseException) -> str | None:
    """Returns what to say of an error of the hub's library that means that a model is neither in
    the cache, at least not all of it, nor can be downloaded. Returns None for other errors."""
    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError):
        return (
            f"{constants.HF_HUB_CACHE} does not have the model, or not all of it, and "
            f"HF_HUB_OFFLINE is set. Name the folder of a checkpoint, or unset it and connect this "
            f"machine to the network."
        )
    # An error of the HTTP client, whose package has other names in other versions.
    request, answer = getattr(error, "_request", None), getattr(error, "response", None)
    if request is not None and answer is None and str(request.url).startswith(constants.ENDPOINT):
        return (
            f"The model hub at {constants.ENDPOINT} does not answer. Name the folder of a "
            f"checkpoint, connect this machine to the network or, if the model was downloaded "
            f"before, set HF_HUB_OFFLINE=1."
        )
    return None


def _describe_unforeseen(error: BaseException) -> str:
    """Returns the line for an error that no check foresaw. Unless its message is meant for users,
    says how to see more."""
    from vllm.exceptions import VLLMClientError  # imports vLLM

    if log_lines.was_raised_in(log_lines.CONFIG_READERS, error):
        reason = "" if isinstance(error, AttributeError) else f": {one_line(error)}"
        return f"--config must be a YAML file of options and values, such as 'port: 8000'{reason}"
    # Python's sockets and certificates raise OSErrors that do not say which file they are about.
    names_no_file = isinstance(error, OSError) and error.errno and error.filename is None
    if isinstance(error, (ValueError, OSError, VLLMClientError)) and not names_no_file:
        return one_line(error)
    if isinstance(error, KeyError) and " " in str(error):  # a sentence, not a key
        return " ".join(str(error.args[0]).split())
    if (line := one_line(error)).startswith("Error: "):
        return line.removeprefix("Error: ")
    more = "VLLM_LOGGING_LEVEL=INFO shows where."
    return f"{type(error).__name__}: {line.rstrip('.')}. {more}"


def discard_first_error() -> None:
    """Deletes the error that a child left, so that it is not taken for one of the engine that this
    process starts next. Does nothing in child processes."""
    if not has_parent():
        take_first_error()


def take_first_error() -> str | None:
    """Returns the error that a child left, and deletes its file; None if no child left one."""
    path = Path(os.environ[FILE])
    line = path.read_text("utf-8") if path.exists() else None
    path.unlink(missing_ok=True)
    return line


def one_line(error: BaseException) -> str:
    """Returns the error's message without line breaks, or its class' name if there is none. Of
    pydantic's errors, only the messages."""
    text = log_lines.WORKER_FAILED.sub(r"\1", str(error)) or type(error).__name__
    if isinstance(error, ValidationError):
        text = "; ".join(_describe_mistake(error.title, mistake) for mistake in error.errors())
    return " ".join(text.split())


_OPTIONS = {"DiffusionConfig": "--diffusion-config", "SpeculativeConfig": "--speculative-config"}
"""vLLM's class -> the option that has its fields."""


def _describe_mistake(title: str, mistake: ErrorDetails) -> str:
    """Returns one of the messages of pydantic's error about the class `title`, with the option that
    the user wrote and, for an unknown name, the nearest known one."""
    names, message = [*map(str, mistake["loc"])], mistake["msg"].removeprefix("Value error, ")
    if title not in _OPTIONS or not names:
        return ": ".join([*names, message])
    came = f"{'.'.join(names)} in {_OPTIONS[title]}"
    if mistake["type"] != "unexpected_keyword_argument":
        return f"{came}: {message}, got {mistake['input']!r}"
    known = getattr(importlib.import_module("vllm.config"), title).__dataclass_fields__
    return describe_unknown_name(names[-1], known, shown=came)


EXAMPLES = {
    "--additional-config": '{"vllm_dllm": {"commit_last_block": true}}',
    "--diffusion-config": '{"canvas_length": 64}',
    "--speculative-config": '{"method": "dflash", "model": "FOLDER", "num_speculative_tokens": 15}',
    "--override-generation-config": '{"t_min": 0.4}',
    "--hf-overrides": '{"block_size": 32}',
}
"""Options that take a JSON object and that diffusion models are served with -> examples."""

_INTEGER = "an integer > 0, or one with k, m, g or t (powers of 1000) or K, M, G or T (of 1024)"
_FILE = (lambda path: os.access(path, os.R_OK), "a file that can be read")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    option: (lambda value: isinstance(value, dict), f"a JSON object such as '{example}'")
    for option, example in EXAMPLES.items()
} | {
    "--kv-cache-memory-bytes": (lambda value: value is None or value > 0, _INTEGER),
    "--uds": (lambda path: Path(path).parent.is_dir(), "a path in a folder that is there"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), _FILE),
}
"""Option -> what must be true of its value, and the text that completes "must be"."""

_stock_get_value = argparse.ArgumentParser._get_value


def check_option_values() -> None:
    """Has all command lines that this process reads checked. Repeatable."""
    argparse.ArgumentParser._get_value = _get_value  # type: ignore[method-assign, assignment]


def _get_value(parser: argparse.ArgumentParser, action: argparse.Action, text: str) -> Any:
    """Returns what `text` on the command line is for the option of `action`. Raises SystemExit with
    one line if it is none of its values."""
    option = max(action.option_strings, key=len, default="")
    is_right, expected = _RULES.get(option, (lambda value: True, "valid JSON in quotes"))
    reason = ""
    try:
        value = _stock_get_value(parser, action, text)
        if is_right(value):
            return value
    except argparse.ArgumentError as error:
        cause = error.__context__ and error.__context__.__cause__
        if isinstance(cause, (json.JSONDecodeError, ValidationError)):
            reason = f": {one_line(cause)}"
        elif "human_readable_int" in str(error):
            expected = _INTEGER
        else:
            raise
    raise SystemExit(f"Error: {option} must be {expected}, got {text!r}{reason}.")
