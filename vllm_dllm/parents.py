"""Ends a server's process when the process that started it is gone."""

import multiprocessing
import os
import threading

_WATCH = "ParentWatch"


def end_with_parent() -> None:
    """Starts a thread that ends this process, with status 1 and without clean-up, as soon as its
    parent process is gone. Does nothing in a process that Python's multiprocessing did not start.
    Repeatable."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        # Nobody is left to tell, and the main thread may be in a step or wait for the next one.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_WATCH).start()
