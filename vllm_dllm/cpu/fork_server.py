"""vLLM's processes on CPUs fork from one that has imported everything.

On CPUs vLLM spawns its engine and then its workers: each is a new Python, and imports PyTorch,
transformers and vLLM for itself, one after the other. Here they fork from Python's fork server,
which imports these once, while the process that needs them does other things. What a spawned
process would inherit (environment, cores, standard output), a forked one is given.

Only that is used: a program that has a fork server of its own, or changes variables that libraries
read when they are loaded, spawns as before.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import context, forkserver, reduction
from pathlib import Path
from typing import Any

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.config.workers import CPU_IMPORTS, cpu_variables
from vllm_dllm.cpu.compat import engine_processes

READ_BY_LIBRARIES = (
    *("GOMP_", "HF_", "KMP_", "LD_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("TORCH", "TRANSFORMERS_", "VLLM_"),
)
"""How the names of variables begin that are read at import."""
EXCEPT = (
    # Set when the configuration has been read, and read after that.
    *("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_DLLM_", "VLLM_SSM_CONV_STATE_LAYOUT"),
    "VLLM_WORKER_MULTIPROC_METHOD",
    # Set by scikit-learn and OpenCV when they are imported, in the fork server, too.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "LD_LIBRARY_PATH"),
)
"""But for these."""
PARENT = "_VLLM_DLLM_FORK_SERVER_PARENT"
"""In the server's environment: the process that started it."""
IMPORTS = "_VLLM_DLLM_FORK_SERVER_IMPORTS"
"""The same: the modules that it imports."""

_environment: dict[str, str] | None = None
"""Of this process' fork server; None if it started none."""


def start(imports: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Starts the fork server, unless there is one, and does not wait for it. `variables` are those
    of its environment that this process does not have yet."""
    global _environment
    if is_forked() or getattr(forkserver._forkserver, "_forkserver_pid", None) is not None:
        return
    if sys.version_info < (3, 11, 1):  # its socket would be open to all users, CVE-2022-42919
        return
    _environment = os.environ | (variables or {})
    forkserver.set_forkserver_preload([f"{__package__}.fork_server_process"])
    of_server = {PARENT: str(os.getpid()), IMPORTS: " ".join(imports)}
    with _changed_environment({**_environment, **of_server}):
        forkserver.ensure_running()


def obstacle() -> str | None:
    """Why a process forked now would not be like a spawned one. None if it would."""
    if is_forked():
        return None
    if _environment is None:
        return "this process has a fork server of its own"
    if changed := changes(_environment, os.environ):
        return f"{', '.join(sorted(changed))} changed after the fork server was started"
    return None


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """The variables read at import that differ."""
    return {
        name
        for name in before.keys() | now.keys()
        if name.startswith(READ_BY_LIBRARIES)
        and not name.startswith(EXCEPT)
        and before.get(name) != now.get(name)
    }


def is_forked() -> bool:
    """Whether this process comes from the fork server."""
    return isinstance(multiprocessing.current_process(), ForkedProcess)


class _Inherited:
    """Unpickled in a forked process, it takes over what the starting process had then."""

    def __reduce__(self) -> tuple[Any, ...]:
        streams = [(fd, reduction.DupFd(fd)) for fd in (1, 2) if _is_open(fd)]
        return _inherit, (dict(os.environ), os.sched_getaffinity(0), streams)


def _inherit(environment: dict[str, str], cores: set[int], streams: list[tuple[int, Any]]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    for fd, inherited in streams:
        os.dup2(inherited.detach(), fd)


class ForkedProcess(context.ForkServerProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inherited = _Inherited()  # before what may depend on it, so it is unpickled first
        super().__init__(*args, **kwargs)

    def _bootstrap(self, *args: Any, **kwargs: Any) -> int:
        """Ends with what libraries of Python and C have registered for the end, which frees shared
        memory too; a fork server would leave that out. What it imported stays as it is: vLLM has an
        engine look for garbage in it at the end, and a spawned process takes it down object by
        object. Both take seconds, and vLLM kills an engine after five."""
        gc.unfreeze = _stay_frozen
        code: int = super()._bootstrap(*args, **kwargs)  # type: ignore[misc]
        atexit._run_exitfuncs()
        # PyDLL keeps Python's lock: none of its threads runs while libraries of C end.
        ctypes.PyDLL(None).exit(code)
        return code


def _stay_frozen() -> None:
    """Stands in the place of `gc.unfreeze`."""


class ForkContext(context.ForkServerContext):
    Process = ForkedProcess


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _changed_environment(wanted: Mapping[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_early(arguments: Sequence[str]) -> None:
    """`vllm serve` of a model of ours starts its fork server before it imports vLLM itself.
    `arguments`: of the command line. Others start it when they start an engine."""
    if multiprocessing.parent_process() is None and serves_our_model(arguments):
        start(
            (*engine_processes.MODULES, *CPU_IMPORTS),
            engine_processes.variables() | cpu_variables(os.environ),
        )


def serves_our_model(arguments: Sequence[str]) -> bool:
    return arguments[1:2] == ["serve"] and any(map(_is_ours, arguments[2:]))


def _is_ours(folder: str) -> bool:
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_bytes())
        return not {DIFFUSION_GEMMA, *FAMILIES}.isdisjoint(config["architectures"])
    except (OSError, ValueError, TypeError, KeyError):
        return False  # not a checkpoint; what is wrong with it, the start will say
