"""`vllm-dllm top`: what a running server does, in a terminal, read from its `/metrics`."""

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from vllm_dllm.errors import InputError
from vllm_dllm.tools.scrape import Scrape, read
from vllm_dllm.tools.top.frame import frame

__all__ = ["run"]

REFRESH_SECONDS = 1.0
WINDOW_SECONDS = 10.0


def run(url: str, once: bool) -> None:
    """Shows the server until `q` or Ctrl-C; one frame of text if `once`, or without a terminal.

    Raises:
        InputError: there is no server, or it has no metrics of canvases.
    """
    url = url.rstrip("/")
    scrapes = deque([read(url)])
    if once or not sys.stdout.isatty():
        time.sleep(REFRESH_SECONDS)
        scrapes.append(read(url))
        Console(color_system=None, highlight=False).print(frame(url, scrapes))
        return
    console = Console(highlight=False)
    with _keys() as is_q_typed, Live(console=console, screen=True, auto_refresh=False) as live:
        problem = None
        while True:
            live.update(frame(url, scrapes, problem), refresh=True)
            if is_q_typed(REFRESH_SECONDS):
                return
            try:
                _add(scrapes, read(url))
                problem = None
            except InputError as error:
                problem = str(error)


def _add(scrapes: deque[Scrape], scrape: Scrape) -> None:
    """Keeps the scrapes of the last seconds, of one life of the server."""
    if scrape.is_behind(scrapes[-1]):
        scrapes.clear()
    scrapes.append(scrape)
    while scrapes[0].at < scrape.at - WINDOW_SECONDS:
        scrapes.popleft()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Reads single keys of the terminal, without Enter, if there is one to type on."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # not on Windows
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _is_q_typed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_q_typed(seconds: float) -> bool:
    """Waits so many seconds for a q; other keys are read and forgotten."""
    end, keyboard = time.monotonic() + seconds, sys.stdin.fileno()
    while (left := end - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left)[0]:
            typed = os.read(keyboard, 64)
            if not typed or b"q" in typed.lower():  # nothing: the terminal is gone
                return True
    return False


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
