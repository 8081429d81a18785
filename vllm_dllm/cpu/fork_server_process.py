"""The fork server's own process: imports what its children need. The server imports this module
first.

The server ends when the last process that may use it has ended, as Python's does. It cannot notice
that while it imports, so a timer checks whether its parent is still there. It ignores signals meant
for all processes of a server: its children have to end in their own way, and it reports how.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Iterable
from multiprocessing import forkserver
from types import FrameType

from vllm_dllm.cpu.fork_server import IMPORTS, PARENT

_PARENT_CHECK_S = 0.5


def run(parent: int, imports: Iterable[str]) -> None:
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
    run(int(os.environ[PARENT]), os.environ[IMPORTS].split())
