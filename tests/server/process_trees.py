"""The processes of a server, by what they do."""

import os
import subprocess
from pathlib import Path

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


def peak_memory(leader: subprocess.Popen[bytes]) -> int:
    """Bytes that each of its processes held at most since its start, added up."""
    total = 0
    for process in processes_of(leader):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    return total


def gone(leader: subprocess.Popen[bytes]) -> bool:
    return leader.poll() is not None and not processes_of(leader)


def engine_of(leader: subprocess.Popen[bytes]) -> int:
    return _titled(leader, "VLLM::EngineCore")


def worker_of(leader: subprocess.Popen[bytes]) -> int:
    return _titled(leader, "VLLM::Worker")


def fork_server_of(leader: subprocess.Popen[bytes]) -> int:
    """The engine's parent, and the worker's."""
    (server,) = {psutil.Process(pid).ppid() for pid in (engine_of(leader), worker_of(leader))}
    return server


def _titled(leader: subprocess.Popen[bytes], title: str) -> int:
    (found,) = (p.pid for p in processes_of(leader) if p.cmdline()[0].startswith(title))
    return found
