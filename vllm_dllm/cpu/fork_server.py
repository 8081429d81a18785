"""Forks vLLM's processes on CPUs from one that has imported everything.

On CPUs vLLM spawns its engine and then its workers. Each is a new Python, and imports PyTorch,
transformers and vLLM for itself, one after the other. Here they fork from Python's fork server,
which imports these once, while the process that starts it does other things. A forked process is
given what a spawned one would inherit: environment, cores, standard output.

A program that has a fork server of its own, or changes variables that libraries read when they are
loaded, spawns as before.

The server's own process imports this module first, and then what its children need. It ends when
the last process that may use it has ended, as Python's does. It cannot notice that while it
imports, so a timer checks whether its parent is still there. It ignores signals meant for all
processes of a server: its children have to end in their own way, and it reports how.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import context, forkserver, reduction
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.config.workers import CPU_IMPORTS, cpu_variables
from vllm_dllm.cpu.compat import engine_processes
from vllm_dllm.parents import end_with_parent, has_parent

READ_BY_LIBRARIES = (
    *("GOMP_", "HF_", "KMP_", "LD_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("TORCH", "TRANSFORMERS_", "VLLM_"),
)
"""Prefixes of variables that libraries read at import."""
NOT_READ_AT_IMPORT = (
    # Set when the configuration has been read, and read after that.
    *("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_DLLM_", "VLLM_SSM_CONV_STATE_LAYOUT"),
    *("VLLM_USE_AOT_COMPILE", "VLLM_WORKER_MULTIPROC_METHOD"),
    # Set by scikit-learn and OpenCV when they are imported, in the fork server, too.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "LD_LIBRARY_PATH"),
)
"""Prefixes of variables that are exceptions from `READ_BY_LIBRARIES`."""
PARENT = "_VLLM_DLLM_FORK_SERVER_PARENT"
"""Variable of the server's environment: the id of the process that started it."""
IMPORTS = "_VLLM_DLLM_FORK_SERVER_IMPORTS"
"""Variable of the server's environment: the modules to import."""

_environment: dict[str, str] | None = None
"""The environment in which this process started its fork server; None if it started none."""
_failure: OSError | None = None
"""Why the fork server could not be started."""


def ensure_running(imports: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Starts the fork server if this process has none, without waiting for it. Does nothing in a
    forked process, and in versions of Python whose fork server is open to all users. Where Python
    cannot start it, such as for its socket's folder, remembers why.

    Args:
        imports: modules that the server imports.
        variables: additions to its environment, which this process will have later.
    """
    global _environment, _failure
    if is_forked() or getattr(forkserver._forkserver, "_forkserver_pid", None) is not None:
        return
    if sys.version_info < (3, 11, 1):  # its socket would be open to all users, CVE-2022-42919
        return
    _environment = os.environ | (variables or {})
    forkserver.set_forkserver_preload([__name__])
    before = dict(os.environ)
    os.environ.update(_environment, **{PARENT: str(os.getpid()), IMPORTS: " ".join(imports)})
    try:
        forkserver.ensure_running()
    except OSError as error:
        _environment, _failure = None, error
    finally:
        os.environ.clear()
        os.environ.update(before)


def find_fork_obstacle() -> str | None:
    """Returns why a process forked now would differ from a spawned one, as the end of a sentence in
    the log, or None if it would not."""
    if is_forked():
        return None
    if _failure is not None:
        return f"the fork server does not start ({_failure})"
    if _environment is None:
        return "this process has a fork server of its own"
    if changed := changed_variables(_environment, os.environ):
        return f"{', '.join(sorted(changed))} changed after the fork server was started"
    return None


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Returns the variables that libraries read at import and that differ in the environments."""
    return {
        name
        for name in before.keys() | now.keys()
        if name.startswith(READ_BY_LIBRARIES)
        and not name.startswith(NOT_READ_AT_IMPORT)
        and before.get(name) != now.get(name)
    }


def is_forked() -> bool:
    """Whether this process was forked from the fork server."""
    return isinstance(multiprocessing.current_process(), ForkedProcess)


class _InheritedState:
    """Pickles as this process' environment, cores and open streams, which unpickling takes over."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the function that restores this process' state, and its arguments."""
        streams = [(fd, reduction.DupFd(fd)) for fd in (1, 2) if _is_open(fd)]
        return _restore_process_state, (dict(os.environ), os.sched_getaffinity(0), streams)


def _restore_process_state(
    environment: dict[str, str], cores: set[int], streams: list[tuple[int, Any]]
) -> None:
    """Gives this forked process the environment, cores and streams of the one that started it."""
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    for fd, inherited in streams:
        os.dup2(inherited.detach(), fd)


class ForkedProcess(context.ForkServerProcess):
    """A process forked from the server, with the state of the process that started it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inherited = _InheritedState()  # unpickled first, as other arguments may need it
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """Runs the process' function, and ends with the process that started this one. An engine
        whose server was interrupted while it started would wait five minutes for it."""
        end_with_parent()
        super().run()

    def _bootstrap(self, *args: Any, **kwargs: Any) -> int:
        """Runs the process and then the exit functions of Python and C libraries, which free shared
        memory. A fork server would skip these functions. Ends the process and does not return.

        Keeps imported modules frozen for garbage collection. vLLM has an engine collect garbage at
        its end, and a spawned process destroys modules object by object. Either takes seconds with
        thawed modules, and vLLM kills an engine after five.
        """
        gc.unfreeze = lambda: None
        code: int = super()._bootstrap(*args, **kwargs)  # type: ignore[misc]
        atexit._run_exitfuncs()
        # PyDLL keeps Python's lock: none of its threads runs while libraries of C end.
        ctypes.PyDLL(None).exit(code)
        return code


class ForkContext(context.ForkServerContext):
    """The multiprocessing context whose processes are ForkedProcess."""

    Process = ForkedProcess


def _is_open(fd: int) -> bool:
    """Whether the file descriptor `fd` is open in this process."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def start_early(arguments: Sequence[str]) -> None:
    """Starts the fork server of `vllm serve` for a model of ours, before the process imports vLLM
    itself. Does nothing in child processes, and for other commands and models, which start it with
    their engine if they need it. `arguments`: the command line."""
    if not has_parent() and serves_our_model(arguments):
        ensure_running(
            (*engine_processes.MODULES, *CPU_IMPORTS),
            engine_processes.engine_variables() | cpu_variables(os.environ),
        )


def serves_our_model(arguments: Sequence[str]) -> bool:
    """Whether the command line is `vllm serve` with the folder of a checkpoint of ours."""
    return arguments[1:2] == ["serve"] and any(map(_is_ours, arguments[2:]))


def _is_ours(folder: str) -> bool:
    """Whether `folder` holds a checkpoint of one of our architectures."""
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_bytes())
        return not {DIFFUSION_GEMMA, *FAMILIES}.isdisjoint(config["architectures"])
    except (OSError, ValueError, TypeError, KeyError):
        return False  # not a checkpoint, or a broken one, which the start will report


_PARENT_CHECK_S = 0.5


def run_server(parent: int, imports: Iterable[str]) -> None:
    """Imports the modules `imports`, and freezes them for garbage collection. `parent`: id of the
    process that started the server. If that process ends during the imports, this one exits."""
    _prepare_server(parent)
    for name in imports:
        with contextlib.suppress(ImportError):  # whoever needs it will say so
            importlib.import_module(name)
    # From here on the parent is not checked, and Python's server ignores SIGINT.
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()  # or garbage collectors of children would write into shared pages
    gc.enable()


def _prepare_server(parent: int) -> None:
    """Sets signals, exit and forks of this process, and starts to check every `_PARENT_CHECK_S`
    whether its parent is still there."""
    server = os.getpid()

    def exit_if_orphaned(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(1)

    def reset_child() -> None:
        """Gives a forked child Python's own signals and exit, and no fork server of its own."""
        if os.getppid() != server:
            return  # a child's child, forked by hand
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(os._exit)
        # Python would start another server for a child's children.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, exit_if_orphaned)
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_S, _PARENT_CHECK_S)
    os.register_at_fork(after_in_child=reset_child)
    # Runs last. Destroying imported modules would take seconds and warn of frozen objects.
    atexit.register(os._exit, 0)
    with contextlib.suppress(ImportError):  # vLLM goes without, too
        # Imported here, since in a child it would look for the arguments at a wrong address.
        importlib.import_module("setproctitle").setproctitle("VLLM::ForkServer")
    gc.disable()  # nothing that is imported is garbage; looking for it takes a seventh of the time


if PARENT in os.environ:  # not where a tool imports all modules
    run_server(int(os.environ[PARENT]), os.environ[IMPORTS].split())
