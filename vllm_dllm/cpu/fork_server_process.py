"""A fork server begins, imports what its children need, and is ready. It imports this module first.

The server ends when the last process that may use it has ended, as Python's do. While it imports it
cannot notice that, so it looks whether its parent is still there. Signals meant for all processes
of a server must leave it alone: its children have to end in their own way, and it has to tell how.
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

_LOOK_EVERY_S = 0.5


def run(parent: int, imports: Iterable[str]) -> None:
    _begin(parent)
    for name in imports:
        with contextlib.suppress(ImportError):  # whoever needs it will say so
            importlib.import_module(name)
    _be_ready()


def _begin(parent: int) -> None:
    server = os.getpid()

    def look(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(1)

    def begin_child() -> None:
        if os.getppid() != server:
            return  # a child's child, forked by hand
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit.unregister(os._exit)
        # Python would start another server for a child's children.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S, _LOOK_EVERY_S)
    os.register_at_fork(after_in_child=begin_child)
    # Last of all: taking down what was imported would take seconds, and complain of what is frozen.
    atexit.register(os._exit, 0)
    with contextlib.suppress(ImportError):  # vLLM goes without, too
        # In a child it would look for the arguments where the environment no longer is.
        importlib.import_module("setproctitle").setproctitle("VLLM::ForkServer")
    gc.disable()  # nothing that is imported is garbage; looking for it takes a seventh of the time


def _be_ready() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Python's server ignores it from here
    # So that no child's garbage collector writes into pages that all of them share.
    gc.collect()
    gc.freeze()
    gc.enable()


if PARENT in os.environ:  # not where a tool imports all modules
    run(int(os.environ[PARENT]), os.environ[IMPORTS].split())
