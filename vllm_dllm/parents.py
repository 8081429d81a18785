"""A process of a server does not outlive the one that started it."""

import multiprocessing
import os
import threading

_WATCH = "ParentWatch"


def end_with_parent() -> None:
    """Lets this process, if another Python process started it, end when that one is gone,
    however it went. Repeatable."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        # Nobody is left to tell, and the main thread may be in a step or wait for the next one.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_WATCH).start()
