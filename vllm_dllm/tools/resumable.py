"""Output folders of commands that write a whole folder or nothing. Repeated after a stop, such a
command continues.

A command writes to OUT.partial, which is renamed to OUT at the end. The file `RUN_FILE` in the
folder identifies the run. The folder's other files were made by that run, and are not made again.
After the renaming, files that OUT does not keep are removed, `RUN_FILE` last. While OUT has
`RUN_FILE`, repeating the command only finishes the run.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_dllm.errors import InputError

RUN_FILE = "run.json"
_UNFINISHED = ".tmp"


def partial_folder(out: Path) -> Path:
    """Returns the path of OUT.partial, and makes nothing. Raises InputError if OUT exists and is
    finished."""
    if out.exists() and not (out / RUN_FILE).exists():
        raise _exists_error(out)
    return out.with_name(out.name + ".partial")


def _exists_error(out: Path) -> InputError:
    """Returns the error for an OUT that another run has written. Does not raise it."""
    return InputError(f"{out} exists already: remove it or name another folder")


def file_marks(files: Iterable[Path]) -> list[list[Any]]:
    """Returns the name, the size in bytes and the time of change of each file. They identify
    weights, without reading the files."""
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def digest(content: object) -> str:
    """Returns the SHA-256 sum, in hexadecimal digits, of the `repr` of a value."""
    return hashlib.sha256(repr(content).encode()).hexdigest()


def is_resumed(partial: Path, run: dict[str, Any], what: str) -> bool:
    """Returns whether `partial` is left from a stopped run that `run`, a value for JSON,
    identified. Writes nothing.

    Raises:
        InputError: it is left from another run; the message says that the runs differ in `what`.
    """
    if not partial.exists() or {f.name for f in partial.iterdir()} <= {RUN_FILE + _UNFINISHED}:
        return False
    if not _is_run_in(run, partial):
        raise InputError(
            f"{partial} is left from a run with another {what}: remove it, or repeat that run to "
            f"finish it"
        )
    return True


def _is_run_in(run: dict[str, Any], folder: Path) -> bool:
    """Returns whether the run that `run` identifies has written the folder."""
    file = folder / RUN_FILE
    # Through JSON and back, or tuples would differ from what was read.
    return file.exists() and read_json(file) == json.loads(json.dumps(run))


def start_run(partial: Path, run: dict[str, Any]) -> None:
    """Makes the folder unless it exists, and writes `run` to its `RUN_FILE`."""
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / RUN_FILE, run)


def finish_run(partial: Path, out: Path, working: Iterable[str] = ()) -> None:
    """Renames `partial` to `out`, removes `working` from it, and prints where the result is.
    `working` has the names of files and folders that only an unfinished run needs."""
    partial.rename(out)
    _remove_working(out, working)


def is_finished(out: Path, run: dict[str, Any], working: Iterable[str] = ()) -> bool:
    """Returns whether the run that `run` identifies made `out`, but was stopped in `finish_run`. If
    so, it removes what that has left. Raises InputError if another run made `out`, or this one has
    finished."""
    if not out.exists():
        return False
    if not _is_run_in(run, out):
        raise _exists_error(out)
    _remove_working(out, working)
    return True


def _remove_working(out: Path, working: Iterable[str]) -> None:
    """Removes `working` and `RUN_FILE` from `out`, and prints that `out` is written."""
    for name in (*working, RUN_FILE):
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    print(f"Wrote {out}", flush=True)


def write_json(path: Path, content: object) -> None:
    """Writes a value as JSON, and replaces `path` in one step: an interruption leaves the old or
    the new file whole."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file."""
    return json.loads(path.read_text())


def progress_bars(console: Console | None = None) -> Progress:
    """Returns a display with one line per task: description, bar, parts done of all, time left.

    Without a `console` the lines are drawn on stderr and stay. With a `console` they are drawn
    there if it is a terminal, and vanish at the end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console or Console(file=sys.stderr),
        transient=console is not None,
        disable=console is not None and not console.is_terminal,
    )
