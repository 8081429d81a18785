"""The processes of a server, by what they do."""

import os
import subprocess

import psutil


def processes_of(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Those of the session that `leader` began, itself too."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def gone(leader: subprocess.Popen[bytes]) -> bool:
    return leader.poll() is not None and not processes_of(leader)


def engine_of(leader: subprocess.Popen[bytes]) -> int:
    """The child that has a child of its own: the worker's parent."""
    (engine,) = {process.ppid() for process in processes_of(leader)} - {leader.pid, os.getpid()}
    return engine


def worker_of(leader: subprocess.Popen[bytes]) -> int:
    engine = psutil.Process(engine_of(leader))
    return max(engine.children(), key=lambda child: child.memory_info().rss).pid
