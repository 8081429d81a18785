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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.errors import InputError

RUN_FILE = "run.json"
_UNFINISHED = ".tmp"


def check_out(out: Path) -> None:
    """Raises InputError if the folder OUT exists and is finished. Call it before slow work whose
    result identifies the run."""
    if out.exists() and not (out / RUN_FILE).exists():
        raise _exists_error(out)


def _exists_error(out: Path) -> InputError:
    """Returns the error for an OUT that exists and must not be overwritten. Does not raise it."""
    return InputError(f"{out} exists already: remove it or name another folder")


@dataclass(frozen=True)
class Run:
    """One run of a command that writes the folder `out`: `is_finished`, then `start`, then the
    command's work in `partial`, then `finish`."""

    out: Path
    identity: dict[str, Any]
    """A value for JSON. Only a run with an equal value continues a stopped run."""
    differs_in: str
    """What `identity` is made of, in words, for an error."""
    working_files: Sequence[str] = ()
    """Names of the files and folders that only an unfinished run needs."""

    @property
    def partial(self) -> Path:
        """The folder OUT.partial."""
        return self.out.with_name(f"{self.out.name}.partial")

    def is_finished(self) -> bool:
        """Returns whether this run had made `out`, but was stopped in `finish`. If so, finishes it.

        Raises:
            InputError: another run made `out` or left `partial`, or this run is finished.
        """
        if self.out.exists():
            if not self._has_written(self.out):
                raise _exists_error(self.out)
            self._clean_up()
            return True
        left = {file.name for file in self.partial.iterdir()} if self.partial.exists() else set()
        if left - {RUN_FILE + _UNFINISHED} and not self._has_written(self.partial):
            raise InputError(
                f"{self.partial} is left from a run with another {self.differs_in}: remove it, or "
                f"repeat that run to finish it"
            )
        return False

    def _has_written(self, folder: Path) -> bool:
        """Returns whether this run has written the folder."""
        file = folder / RUN_FILE
        # Through JSON and back, or tuples would differ from what was read.
        return file.exists() and json.loads(file.read_text()) == json.loads(
            json.dumps(self.identity)
        )

    def start(self) -> None:
        """Makes `partial` unless it exists, and writes `RUN_FILE` there."""
        self.partial.mkdir(parents=True, exist_ok=True)
        write_json(self.partial / RUN_FILE, self.identity)

    def finish(self) -> None:
        """Renames `partial` to `out`, removes the working files, and prints where the result is."""
        self.partial.rename(self.out)
        self._clean_up()

    def _clean_up(self) -> None:
        """Removes the working files and `RUN_FILE` from `out`, and prints that `out` is written."""
        for name in (*self.working_files, RUN_FILE):
            if (self.out / name).is_dir():
                shutil.rmtree(self.out / name)
            else:
                (self.out / name).unlink(missing_ok=True)
        print(f"Wrote {self.out}", flush=True)


def weight_marks(folder: Path) -> list[list[Any]]:
    """Returns the name, the size in bytes and the time of change of each weight file. They identify
    weights, without reading the files."""
    stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def digest(content: object) -> str:
    """Returns the SHA-256 sum, in hexadecimal digits, of the `repr` of a value."""
    return hashlib.sha256(repr(content).encode()).hexdigest()


def write_json(path: Path, content: object) -> None:
    """Writes a value as JSON, and replaces `path` in one step: an interruption leaves the old or
    the new file whole."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
