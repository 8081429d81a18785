"""Imported by a fork server after everything else."""

import gc
import os
import signal

from vllm_dllm.cpu.fork_server import PARENT


def be_ready() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Python's server ignores it from here
    # So that no child's garbage collector writes into pages that all of them share.
    gc.collect()
    gc.freeze()
    gc.enable()


if PARENT in os.environ:
    be_ready()
