"""Files that a server writes: whole lines, for their owner alone, and never in the way."""

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.files import LineFile, check_file, check_folder


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """In each file of this process: what is written behind fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(b"first\n")
    with room_for(10):
        with pytest.raises(OSError):
            file.append(b"second\n")
        assert path.read_bytes() == b"first\n"
        file.append(b"2nd\n")
    file.append(b"third\n")
    assert path.read_bytes() == b"first\n2nd\nthird\n"
    file.close()


def test_where_a_part_cannot_be_taken_back_no_line_is_joined_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, size: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "ftruncate", refuse)
    path = tmp_path / "lines"
    file = LineFile(path)
    with room_for(4), pytest.raises(OSError):
        file.append(b"first\n")
    file.append(b"second\n")
    file.append(b"third\n")
    assert path.read_bytes() == b"firs\nsecond\nthird\n"


def test_another_process_writes_behind_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line stays."""
    path = tmp_path / "lines"
    ours, theirs = LineFile(path), LineFile(path)
    write = os.write

    def write_some(file: int, data: bytes) -> int:
        if path.stat().st_size:
            monkeypatch.undo()
            theirs.append(b"\ntheirs\n")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError):
        ours.append(b"ours\n")
    ours.append(b"again\n")
    assert path.read_bytes().splitlines() == [b"our", b"theirs", b"", b"again"]


def test_a_file_that_ends_with_part_of_a_line_is_gone_on_with(tmp_path: Path) -> None:
    """What a process left that was killed."""
    path = tmp_path / "lines"
    path.write_bytes(b'{"whole": 1}\n{"hal')
    LineFile(path).append(b"next\n")
    assert path.read_bytes() == b'{"whole": 1}\n{"hal\nnext\n'


def test_only_the_owner_reads(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        check_file("trace_path", tmp_path / "trace")
        check_folder("drafter.buffer", tmp_path / "blocks")
    finally:
        os.umask(umask)
    assert mode(tmp_path / "trace") == 0o600
    assert mode(tmp_path / "blocks") == 0o700


def test_what_a_check_leaves_behind(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a line\n")
    check_file("trace_path", tmp_path / "trace")
    assert (tmp_path / "trace").read_text() == "a line\n"
    check_folder("drafter.buffer", tmp_path / "blocks")
    assert list((tmp_path / "blocks").iterdir()) == []
    check_file("trace_path", Path("/dev/null"))


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder / "socket"


def read_only(folder: Path) -> Path:
    return Path("/proc/trace")  # for root, too


UNUSABLE = {
    "a folder": (lambda folder: folder, "Is a directory"),
    "in no folder": (lambda folder: folder / "no" / "trace", "No such file or directory"),
    "in a file": (lambda folder: Path(__file__) / "trace", "Not a directory"),
    "a pipe": (pipe, "it is a pipe or a socket"),
    "a socket": (listening, "it is a pipe or a socket"),
    "a name too long": (lambda folder: folder / ("x" * 300), "File name too long"),
    "read-only": (read_only, "No such file or directory|Permission denied|Read-only"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_trace_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    place, reason = UNUSABLE[name]
    with pytest.raises(ValueError, match=rf"^trace_path must be a file .* got '.*': ({reason})\. "):
        check_file("trace_path", place(tmp_path))


@pytest.mark.parametrize("place", [__file__, f"{__file__}/blocks", "/proc/blocks"])
def test_a_buffer_that_cannot_be_written(place: str) -> None:
    with pytest.raises(ValueError, match=r"^drafter.buffer must be a folder .* got '.*': \w.*\. "):
        check_folder("drafter.buffer", Path(place))


@pytest.mark.parametrize("value", [5, True, "", "a\0b", ["trace"], {}], ids=repr)
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(ValueError, match="trace_path must be a path, a string, got "):
        ExtensionConfig.from_additional_config({"vllm_dllm": {"trace_path": value}})
    for key in ("buffer", "predictor"):
        with pytest.raises(ValueError, match=f"drafter.{key} must be a path, a string, got "):
            section = {key: value, "width_policy": "blockpilot"}
            ExtensionConfig.from_additional_config({"vllm_dllm": {"drafter": section}})
