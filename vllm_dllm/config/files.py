"""Files that a server writes while it serves.

They hold clients' texts, so only their owner may read them. A server does not start if they cannot
be written at all. If the disk fails or fills up later, only the lines that it did not take are
lost.
"""

import contextlib
import os
import tempfile
from pathlib import Path

OWNER_ONLY_FILE, OWNER_ONLY_FOLDER = 0o600, 0o700
_KIND = "it is a pipe or a socket"


class LineFile:
    """Appends whole lines to a file. Other processes may append to it, too."""

    def __init__(self, path: Path) -> None:
        """Opens the file at `path`, or makes it, for its owner only. Raises OSError."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, OWNER_ONLY_FILE)
        size = os.fstat(self._file).st_size
        self.is_cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        """Whether the file ends with part of a line. If so, `append` writes a line break first."""

    def append(self, line: bytes) -> None:
        """Appends `line`, which has its line break.

        Raises:
            OSError: it could not be written whole. The part that was written is removed. Where that
                is not possible, the next line begins after a line break.
        """
        data = b"\n" + line if self.is_cut else line
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                self._truncate(written)
            raise
        self.is_cut = False

    def _truncate(self, num_bytes: int) -> None:
        """Removes the `num_bytes` bytes that were just written. Sets `is_cut` instead if another
        process has appended after them, or the file cannot be made shorter."""
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size == end:
                os.ftruncate(self._file, end - num_bytes)
                return
        self.is_cut = True

    def close(self) -> None:
        os.close(self._file)


def check_file(key: str, path: Path) -> None:
    """Makes the file at `path` if there is none. Raises ValueError if no lines can be appended to
    it, or if it is a pipe or a socket. `key`: the setting's name in the error."""
    try:
        # A pipe would hold up every step that its reader does not keep up with.
        if path.exists() and not (path.is_dir() or path.is_file() or path.is_char_device()):
            raise OSError(None, _KIND)
        LineFile(path).close()
    except OSError as error:
        raise ValueError(
            f"{key} must be a file that can be written, got {str(path)!r}: {error.strerror}. Name "
            f"a file in a folder that is there and may be written to."
        ) from error


def check_folder(key: str, path: Path) -> None:
    """Makes the folder at `path` if there is none. Raises ValueError unless files can be made in
    it. `key`: the setting's name in the error."""
    try:
        path.mkdir(OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{key} must be a folder that can be written to, got {str(path)!r}: {error.strerror}. "
            f"Name another, or change its permissions."
        ) from error
