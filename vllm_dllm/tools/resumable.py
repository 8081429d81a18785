"""Commands that write a whole folder or nothing, and continue when repeated after a stop.

Everything is written to OUT.partial, which is renamed to OUT at the end. One file in it identifies
the run; every other file there was made by that run and is not made again. Files that OUT does not
keep are removed after the renaming, the run's own last: while OUT has it, repeating the command
finishes the run.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dllm.errors import InputError

RUN_FILE = "run.json"
_UNFINISHED = ".tmp"


def partial_folder(out: Path) -> Path:
    """Names OUT.partial. Raises InputError if OUT already exists and is finished."""
    if out.exists() and not (out / RUN_FILE).exists():
        raise _exists(out)
    return out.with_name(out.name + ".partial")


def _exists(out: Path) -> InputError:
    return InputError(f"{out} exists already: remove it or name another folder")


def file_marks(files: Iterable[Path]) -> list[list[Any]]:
    """Gives name, size and time of each file, which tell weights apart without reading them."""
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def is_resumed(partial: Path, run: dict[str, Any], what: str) -> bool:
    """Says whether the same run left `partial`. Writes nothing.

    run: identifies the run, and can be stored as JSON. Raises InputError if another run left
    `partial`; its message says that they differ in `what`.
    """
    if not partial.exists() or {f.name for f in partial.iterdir()} <= {RUN_FILE + _UNFINISHED}:
        return False
    if not _is_of(run, partial):
        raise InputError(
            f"{partial} is left from a run with another {what}: remove it, or repeat that run to "
            f"finish it"
        )
    return True


def _is_of(run: dict[str, Any], folder: Path) -> bool:
    file = folder / RUN_FILE
    # Through JSON and back, or tuples would differ from what was read.
    return file.exists() and read_json(file) == json.loads(json.dumps(run))


def start(partial: Path, run: dict[str, Any]) -> None:
    """Makes the folder unless it is there, and writes what identifies the run."""
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / RUN_FILE, run)


def finish(partial: Path, out: Path, working: Iterable[str] = ()) -> None:
    """Renames `partial` to `out`, removes `working`, the files and folders that only an unfinished
    run needs, and says where the rest is."""
    partial.rename(out)
    _clear(out, working)


def is_finished(out: Path, run: dict[str, Any], working: Iterable[str] = ()) -> bool:
    """Says whether the same run made `out` and was stopped in `finish`; if so, completes that.
    Raises InputError if another run made `out`."""
    if not out.exists():
        return False
    if not _is_of(run, out):
        raise _exists(out)
    _clear(out, working)
    return True


def _clear(out: Path, working: Iterable[str]) -> None:
    for name in (*working, RUN_FILE):
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    print(f"Wrote {out}", flush=True)


def write_json(path: Path, content: object) -> None:
    """Replaces `path` in one step, so that an interruption leaves the old or the new file."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
