"""Which process started this one, and an end when it is gone."""

import multiprocessing
import os
import threading

_WATCH = "ParentWatch"


def has_parent() -> bool:
    """Whether Python's multiprocessing started this process. `parent_process` says so only when
    the process' function runs. What the function needs is imported before that, and vLLM with it.
    """
    is_named = multiprocessing.current_process().name != "MainProcess"
    return is_named or multiprocessing.parent_process() is not None


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
