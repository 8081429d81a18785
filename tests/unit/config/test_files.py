"""Settings that are refused before there is a step, the folder of a server's feeds, and files that
a server writes: whole lines, for their owner alone, and never in the way."""

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import output_of
from vllm_dllm.config import canvas_feeds
from vllm_dllm.config.denoise import DenoiseConfig
from vllm_dllm.config.extension import ExtensionConfig, LoadStage
from vllm_dllm.config.files import LineFile, check_file, check_folder

GOOD: dict[str, Any] = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}
NAN, INFINITE = float("nan"), float("inf")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_denoising_steps": 10**30}, "must be an integer >= 1 and <= 1048576, got 10000"),
    ({"max_denoising_steps": 0}, "max_denoising_steps must be an integer >= 1 and <= .*, got 0"),
    ({"max_denoising_steps": 2.0}, "max_denoising_steps must be an integer .* got 2.0"),
    ({"stability_threshold": 10**25}, "stability_threshold must be an integer >= 0 and <= 1048576"),
    ({"stability_threshold": True}, "stability_threshold must be an integer .* got True"),
    ({"t_min": -0.1}, "t_min must be a number >= 0 and <= 1000, got -0.1"),
    ({"t_min": NAN}, "t_min must be a number .* got nan"),
    ({"t_max": INFINITE}, "t_max must be a number >= 0.001 and <= 1000, got inf"),
    ({"t_min": 0.0, "t_max": 1e-30}, "t_max must be a number >= 0.001 and <= 1000, got 1e-30"),
    ({"t_max": 10**400}, "t_max must be a number .* got 1000"),
    ({"t_max": 0.4}, "t_max must be > t_min = 0.4, got 0.4"),
    ({"confidence_threshold": 0}, "confidence_threshold must be a number > 0 and <= 1e.06, got 0"),
    ({"confidence_threshold": 1e300}, "confidence_threshold must be a number .* got 1e.300"),
    ({"confidence_threshold": "1"}, "confidence_threshold must be a number .* got '1'"),
    (
        {"sampler_config": {**GOOD["sampler_config"], "entropy_bound": INFINITE}},
        "entropy_bound must be a number > 0 and <= 1e.06, got inf",
    ),
    ({"sampler_config": {"_cls_name": "X"}}, "sampler_config must be of kind 'Entropy.*got {'_cls"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(c)[:40] for c, _ in WRONG])
def test_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        DenoiseConfig.from_generation_config(GOOD | changes)
    assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


def test_at_the_ends() -> None:
    DenoiseConfig.from_generation_config(GOOD)
    DenoiseConfig.from_generation_config(
        GOOD | {"t_min": 0.0, "t_max": 1e3, "stability_threshold": 0}, max_denoising_steps=1 << 20
    )


COUNTS = ["sampling_memory_mib", "self_conditioning_top_k"]
COUNTS += ["drafter.width", "drafter.max_context", "drafter.draft_window"]
COUNTS += ["drafter.buffer_mib", "drafter.load_rows"]


@pytest.mark.parametrize("key", COUNTS)
def test_counts_have_a_most(key: str) -> None:
    section, _, name = key.rpartition(".")
    settings = {section: {name: 10**30}} if section else {name: 10**30}
    with pytest.raises(ValueError, match=f"{key} must be an integer >= 1 and <= 1073741824, got 1"):
        ExtensionConfig.from_additional_config({"vllm_dllm": settings})


def test_what_a_stage_leaves_out_it_loosens_nothing_of() -> None:
    config = ExtensionConfig.from_additional_config(
        {"vllm_dllm": {"load_stages": [{"canvases": 8, "stability_threshold": 0}]}}
    )
    assert config.load_stages == (LoadStage(8, stability_threshold=0),)
    assert config.load_stages[0].confidence_threshold == 0


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"canvases": 8}, "load_stages must be a list, each an object with the keys"),
        ([{"stability_threshold": 0}], "load_stages.0.canvases is missing. It must be an integer"),
        ([{"canvases": 8, "steps": 1}], "load_stages.0.steps is not known. Known are: .*canvases"),
        ([{"canvases": 0}], "load_stages.0.canvases must be an integer >= 1"),
        ([{"canvases": 8, "confidence_threshold": -1}], "a number >= 0 and <= 1e.06, got -1"),
        ([{"canvases": 8, "confidence_threshold": "much"}], "got 'much'"),
        (
            [{"canvases": 8, "stability_threshold": 0.5}],
            "stability_threshold must be an integer >= 0 .* got 0.5",
        ),
        ([{"canvases": 8}, {"canvases": 8}], "with more canvases than the one before"),
        (
            [{"canvases": 8, "stability_threshold": 0}, {"canvases": 9, "stability_threshold": 1}],
            "no tighter threshold",
        ),
        (
            [{"canvases": 8, "stability_threshold": 0}, {"canvases": 9}],
            r'got {"canvases": 9} after {"canvases": 8, "stability_threshold": 0}\. A threshold',
        ),
        (
            [
                {"canvases": 8, "confidence_threshold": 0.02},
                {"canvases": 9, "confidence_threshold": 0.01},
            ],
            "no tighter threshold",
        ),
    ],
)
def test_what_is_refused(section: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExtensionConfig.from_additional_config({"vllm_dllm": {"load_stages": section}})


def test_a_folder_lasts_as_long_as_the_first_process(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import subprocess, sys\n"
        "from vllm_dllm.config import canvas_feeds\n"
        "canvas_feeds.make_socket_folder(sys.argv[1])\n"
        "folder = canvas_feeds.socket_folder()\n"
        "if len(sys.argv) == 2:\n"
        "    subprocess.run([sys.executable, *sys.argv, 'child'], check=True)\n"
        "print(folder, oct(folder.stat().st_mode & 0o777), flush=True)\n"
    )
    base = tmp_path / "base"
    base.mkdir()
    env = {key: value for key, value in os.environ.items() if key != canvas_feeds.FOLDER}
    child, parent = output_of(program, base, env=env).splitlines()
    assert child == parent and parent.startswith(f"{base}/") and parent.endswith(" 0o700")
    assert not list(base.iterdir())


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
