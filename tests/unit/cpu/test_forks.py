"""Processes that fork from one that has imported vLLM."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor import multiproc_executor

from tests.patched import patched
from tests.processes import is_running, run, wait_for
from vllm_dllm.config.workers import CPU_WORKER
from vllm_dllm.cpu import fork_server, install
from vllm_dllm.cpu.compat import cores as cpu_cores
from vllm_dllm.cpu.compat import engine_processes
from vllm_dllm.cpu.fork_server import changed_variables

PROGRAM = """
import json, multiprocessing, os, pathlib, signal, sys, time
from vllm_dllm.cpu import fork_server

def write(path, **what):
    path = pathlib.Path(path)
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)

def child(folder, depth):
    print("from a child", flush=True)
    write(
        folder / f"child{depth}",
        pid=os.getpid(),
        server=os.getppid(),
        imported="colorsys" in sys.modules,
        environment=dict(os.environ),
        cores=sorted(os.sched_getaffinity(0)),
        usual_signals=(
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            and signal.getsignal(signal.SIGINT) == signal.default_int_handler
        ),
    )
    if depth:
        fork_server.ForkContext().Process(target=child, args=(folder, depth - 1)).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    time.sleep(10**6)

if __name__ == "__main__":
    folder, imports = pathlib.Path(sys.argv[1]), sys.argv[2:]
    os.environ.update(GONE="later", STAYS="1")
    fork_server.ensure_running(imports, {"EARLY": "1"})
    write(folder / "started", pid=multiprocessing.forkserver._forkserver._forkserver_pid)
    assert fork_server.find_fork_obstacle() is None and "EARLY" not in os.environ
    fork_server.ensure_running(["no_such_module"])  # there is one
    os.environ["ADDED"] = "1"
    del os.environ["GONE"]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = fork_server.ForkContext().Process(target=child, args=(folder, 1))
    process.start()
    process.join()
    write(folder / "ended", code=process.exitcode)
"""

ENDING = """
import atexit, ctypes, gc, pathlib, sys
from vllm_dllm.cpu import fork_server

class Held:
    def __init__(self, path):
        self.path = path

    def __del__(self):
        self.path.touch()

def child(folder):
    global held, c_end
    held = Held(folder / "taken_down")
    atexit.register((folder / "python").touch)
    c_end = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: (folder / "c").touch())
    ctypes.CDLL(None)["__cxa_atexit"](c_end, None, None)
    gc.unfreeze()
    assert gc.get_freeze_count() > 0
    sys.exit(7)

if __name__ == "__main__":
    fork_server.ensure_running(["colorsys"])
    process = fork_server.ForkContext().Process(target=child, args=(pathlib.Path(sys.argv[1]),))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


WITHOUT = """
from vllm_dllm.cpu import fork_server

fork_server.ensure_running(["colorsys"])
print(fork_server.find_fork_obstacle())
"""


def test_without_room_for_its_socket(tmp_path: Path) -> None:
    """Processes are spawned, and nothing else of a start is left out."""
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    done = run(sys.executable, "-c", WITHOUT, variables={"TMPDIR": str(folder)})
    assert done.stdout == "the fork server does not start (AF_UNIX path too long)\n", done.stderr


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(10**6)\n")
    return path


@pytest.fixture
def running(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """With two children, each of the other's; in a process group of their own."""
    process = start(program, "colorsys")
    yield process
    kill_group(process)


def start(program: Path, *imports: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, str(program), str(program.parent), *imports],
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{program.parent}"},
        start_new_session=True,
    )


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def note(program: Path, name: str) -> Any:
    path = program.parent / name
    wait_for(path.exists)
    return json.loads(path.read_text())


def test_what_a_child_inherits(program: Path, running: "subprocess.Popen[bytes]") -> None:
    server = note(program, "started")["pid"]
    for depth in (1, 0):  # the child, and its child
        child = note(program, f"child{depth}")
        environment = child["environment"]
        assert child["server"] == server
        assert child["imported"] and child["usual_signals"]
        assert environment["ADDED"] == environment["STAYS"] == "1"
        assert not {"GONE", "EARLY"} & environment.keys()
        assert len(child["cores"]) == 1
    assert (program.parent / "output").read_text() == "from a child\n" * 2


def test_signals_for_all_leave_the_server_to_the_last(
    program: Path, running: "subprocess.Popen[bytes]"
) -> None:
    note(program, "child0")
    os.killpg(running.pid, signal.SIGTERM)
    assert note(program, "ended")["code"] == 7  # as the server told
    wait_for(lambda: not is_running(note(program, "started")["pid"]))


def test_nothing_is_left_when_the_parent_is_killed(
    program: Path, running: "subprocess.Popen[bytes]"
) -> None:
    pids = [note(program, name)["pid"] for name in ("started", "child1", "child0")]
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    for pid in pids:
        wait_for(lambda pid=pid: not is_running(pid))


def test_nor_while_the_server_imports(program: Path) -> None:
    process = start(program, "endless_import")
    server = note(program, "started")["pid"]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not is_running(server))


def test_libraries_end_and_nothing_is_taken_down(tmp_path: Path) -> None:
    """What is registered for the end of Python and of C runs, as it frees shared memory. The heap
    is left as it is: that took longer than vLLM waits for an engine."""
    program, folder = tmp_path / "program.py", tmp_path / "ends"
    program.write_text(ENDING)
    folder.mkdir()
    done = run(sys.executable, program, folder, variables={"PYTHONPATH": os.getcwd()})
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert sorted(path.name for path in folder.iterdir()) == ["c", "python"]


def test_variables_that_count() -> None:
    before = {"OMP_NUM_THREADS": "2", "HOME": "/a", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    assert changed_variables(before, {"HOME": "/b", "OMP_NUM_THREADS": "2"}) == set()
    now = {"HOME": "/a", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert changed_variables(before, now) == {"OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"}


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_server, "ensure_running", lambda imports: None)
    with patched("v1.executor.multiproc_executor:get_mp_context"):
        yield


def config(worker_cls: str = CPU_WORKER, numa_bind: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker_cls, numa_bind=numa_bind)
    )


def test_engines_of_our_workers_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "find_fork_obstacle", lambda: None)
    assert install._fork_context(config()) is fork_server.ForkContext
    assert install._fork_context(config("vllm.v1.worker.cpu_worker.CPUWorker")) is None
    assert install._fork_context(config(numa_bind=True)) is None


def test_what_stands_in_the_way_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "find_fork_obstacle", lambda: "OMP_NUM_THREADS changed")
    with caplog.at_level(logging.INFO, "vllm_dllm"):
        assert install._fork_context(config()) is None
    assert "because OMP_NUM_THREADS changed" in caplog.text


@pytest.mark.parametrize(("num_cores", "fork"), [(2, True), (8, True), (9, False)])
def test_workers_fork_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, fork: bool
) -> None:
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    monkeypatch.setattr(cpu_cores, "available_cpu_count", lambda: num_cores)
    install.fork_processes()
    assert (multiproc_executor.get_mp_context is fork_server.ForkContext) == fork


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GOMP_CPU_AFFINITY": "0 1"}, [0, 1]),
        ({"OMP_PLACES": "{3,5}"}, [3, 5]),
        ({"GOMP_CPU_AFFINITY": "0 1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, []),
        ({}, []),
    ],
)
def test_the_cores_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[int]
) -> None:
    for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert engine_processes.worker_cores() == expected


def test_a_forked_worker_computes_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(engine_processes, "worker_cores", lambda: [0, 1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(install.cores, "set_num_threads", found.append)
    install.compute_on_chosen_cores()
    assert found == []  # this process was not forked
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    install.compute_on_chosen_cores()
    assert found == [[0, 1], 2]


def test_cores_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "is_forked", lambda: True)
    there = sorted(os.sched_getaffinity(0))
    for wrong in ([4000], [*there, 4000]):
        monkeypatch.setattr(engine_processes, "worker_cores", lambda wrong=wrong: wrong)
        with pytest.raises(ValueError, match="VLLM_CPU_OMP_THREADS_BIND must name cores") as error:
            install.compute_on_chosen_cores()
        assert f"among {there}, got {wrong}." in str(error.value)
