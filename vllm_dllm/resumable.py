"""Commands that write a folder: the whole of it or none, and a stopped one goes on when repeated.

Everything is written to OUT.partial and renamed to OUT at the end. Until then a file in it says
what makes two runs the same run; whatever else lies there was made by that run and is made once.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_dllm.errors import InputError

RUN_FILE = "run.json"  # in OUT.partial only


def exit_status(command: str, work: Callable[[], object]) -> int:
    """Runs `work` for `vllm-dllm COMMAND`; says in one line why it ended early."""
    try:
        work()
    except InputError as error:
        print(f"vllm-dllm {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"vllm-dllm {command}: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def partial_folder(out: Path) -> Path:
    """OUT.partial. Raises InputError where OUT is there already."""
    if out.exists():
        raise InputError(f"{out} exists already: remove it or name another folder")
    return out.with_name(out.name + ".partial")


def file_marks(files: Iterable[Path]) -> list[list[Any]]:
    """Name, bytes and time of each file: what tells weights apart without reading them."""
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def is_resumed(partial: Path, run: dict[str, Any], what: str) -> bool:
    """Whether `partial` is left from the same run; nothing is written.

    run: what makes two runs the same run, as JSON has it. Raises InputError where `partial` is left
    from another one, which had another of `what`.
    """
    if not partial.exists() or not any(partial.iterdir()):
        return False
    run_file = partial / RUN_FILE
    # Through JSON and back, or tuples would differ from what was read.
    if not run_file.exists() or json.loads(run_file.read_text()) != json.loads(json.dumps(run)):
        raise InputError(
            f"{partial} is left from a run with another {what}: remove it, or repeat that run to "
            f"finish it"
        )
    return True


def start(partial: Path, run: dict[str, Any]) -> None:
    """Makes the folder, or goes on with it."""
    partial.mkdir(parents=True, exist_ok=True)
    write_json(partial / RUN_FILE, run)


def finish(partial: Path, out: Path, working_files: Iterable[str] = ()) -> None:
    """Removes what only an unfinished run needs; `out` comes to exist."""
    for name in (RUN_FILE, *working_files):
        (partial / name).unlink(missing_ok=True)
    partial.rename(out)


def write_json(path: Path, content: object) -> None:
    """Replaces `path` in one step, so that an interruption leaves the old or the new file."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
