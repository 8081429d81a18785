"""A process does not outlive the one that started it, even if that was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import is_running, wait_for

PARENT = """
import multiprocessing, os, sys, time
from vllm_dllm.parents import end_with_parent

def child(path):
    end_with_parent()
    end_with_parent()  # repeatable
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(10**6)

if __name__ == "__main__":
    end_with_parent()  # of nobody
    context = multiprocessing.get_context(sys.argv[1])
    context.Process(target=child, args=(sys.argv[2],)).start()
    time.sleep(10**6)
"""


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    for method in ("spawn", "fork"):
        note = tmp_path / method
        parent = subprocess.Popen([sys.executable, str(program), method, str(note)])
        wait_for(lambda note=note: note.exists() and note.read_text().endswith("\n"))
        child = int(note.read_text())
        assert is_running(child) and is_running(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_for(lambda child=child: not is_running(child))
