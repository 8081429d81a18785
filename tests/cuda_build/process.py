"""Processes in which a GPU seems to be there: one for each machine imports vLLM, half a minute's
work, and each engine runs in a fork of it, because an engine leaves much behind in its process."""

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.cuda_build.machine import Host

_CONTEXT = get_context("fork")
Chore = Callable[..., Any]
"""A function of a module, given the device and what else it asks for. What it returns travels."""


class Importer:
    """`folder`: for the logs, and for what its engines share."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self._mine, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_import_and_serve, args=(theirs, self._mine, host, folder)
        )
        self._process.start()
        theirs.close()

    def run(self, chore: Chore, **arguments: Any) -> Any:
        """Raises AssertionError with the traceback of what failed."""
        self._mine.send((chore, arguments))
        done, result = self._mine.recv()
        if not done:
            raise AssertionError(result)
        return result

    def close(self) -> None:
        self._mine.close()
        self._process.join()


def _import_and_serve(pipe: Connection, other_end: Connection, host: Host, folder: Path) -> None:
    other_end.close()
    log = os.open(folder / f"{host}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    device: Any = None
    failed: str | None = None
    try:
        device = _import(host, folder)
    except BaseException:
        failed = traceback.format_exc()
    while True:
        try:
            chore, arguments = pipe.recv()
        except EOFError:
            return
        if failed is not None:
            pipe.send((False, failed))
            continue
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        child = _CONTEXT.Process(target=_run, args=(theirs, device, chore, arguments))
        child.start()
        theirs.close()
        try:
            answer = mine.recv()
        except EOFError:
            child.join()
            answer = (False, f"the process ended with {child.exitcode}; its log is in {folder}")
        pipe.send(answer)
        child.kill()  # threads of what it imported may wait for ever
        child.join()


def _import(host: Host, folder: Path) -> Any:
    from tests.cuda_build import driver, machine

    os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")
    driver.load(folder)
    device = machine.install(host)
    from tests.cuda_build import engine

    engine.import_everything(device)
    if host.num_gpus > 1:
        from tests.cuda_build import ranks

        ranks.install()
    return device


def _run(pipe: Connection, device: Any, chore: Chore, arguments: dict[str, Any]) -> None:
    try:
        answer = (True, chore(device, **arguments))
    except BaseException:
        answer = (False, _shortened(traceback.format_exc()))
        print(answer[1], file=sys.stderr, flush=True)
    pipe.send(answer)


def _shortened(text: str) -> str:
    """Without the frames of PyTorch, which are many."""
    lines = text.splitlines()
    kept: list[str] = []
    skips = False
    for line in lines:
        if line.startswith("  File "):
            skips = "/torch/" in line
        elif not line.startswith("    "):
            skips = False
        if not skips:
            kept.append(line)
    return "\n".join(kept[-60:])
