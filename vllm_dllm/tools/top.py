"""`vllm-dllm top`: what a running server does, in a terminal, read from its `/metrics`."""

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_dllm.errors import InputError
from vllm_dllm.tools.scrape import Change, Scrape, scrape_canvases

__all__ = ["run"]

REFRESH_SECONDS = 1.0  # between two scrapes
WINDOW_SECONDS = 10.0  # that the recent numbers are about


def run(url: str, once: bool) -> None:
    """Shows the server's metrics until `q` or Ctrl-C. With `once`, or without a terminal, prints
    one frame as text and returns.

    Raises:
        InputError: at the start there is no server, or it has no metrics of canvases.
    """
    url = url.rstrip("/")
    scrapes = deque([scrape_canvases(url)])
    if once or not sys.stdout.isatty():
        time.sleep(REFRESH_SECONDS)
        scrapes.append(scrape_canvases(url))
        Console(color_system=None, highlight=False).print(draw_frame(url, scrapes))
        return
    console = Console(highlight=False)
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        problem = None
        while True:
            live.update(draw_frame(url, scrapes, problem), refresh=True)
            if _wait_for_q(REFRESH_SECONDS):
                return
            try:
                latest, problem = scrape_canvases(url), None
            except InputError as error:
                problem = str(error)
                continue
            if latest.has_restarted_since(scrapes[-1]):
                scrapes.clear()
            scrapes.append(latest)
            while scrapes[0].at < latest.at - WINDOW_SECONDS:
                scrapes.popleft()


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Sets the terminal, if standard input is one, to pass single keys without Enter. Restores it
    after the block."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # not on Windows
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_q(seconds: float) -> bool:
    """Waits until a q is typed, but at most `seconds`. Returns whether one was typed, or the
    terminal is gone. Without a terminal it waits `seconds` and returns False."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end, keyboard = time.monotonic() + seconds, sys.stdin.fileno()
    while (left := end - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left)[0]:
            typed = os.read(keyboard, 64)
            if not typed or b"q" in typed.lower():  # nothing: the terminal is gone
                return True
    return False


BAR = 24  # characters
NONE = "–"


def draw_frame(url: str, scrapes: Sequence[Scrape], problem: str | None = None) -> RenderableType:
    """Returns all lines to show, from scrapes of which the oldest comes first. `problem` is an
    error to show below them."""
    now = scrapes[-1]
    models = now.totals_by("vllm_dllm:forwards_total", "model_name")
    running = now.total("vllm:num_requests_running")
    waiting = now.total("vllm:num_requests_waiting")
    lines: list[RenderableType] = [
        Text.assemble((", ".join(models), "bold"), f"  {url}"),
        "",
        _labelled_line("Requests", f"{running:.0f} running, {waiting:.0f} waiting"),
        _memory_line(now),
        "",
        _rates_table(scrapes),
        "",
        _shares_line("Blocks finished by", now, "canvases_finished", "cause"),
        _shares_line("Requests by rule", now, "requests", "acceptance"),
    ]
    if cut := now.total("vllm_dllm:canvases_cut_total"):
        lines.append(_labelled_line("Canvases cut", f"{cut:.0f}, by the end of the context"))
    if len(engines := now.totals_by("vllm:num_requests_running", "engine")) > 1:
        lines += ["", _engines_table(now, engines)]
    if problem is not None:
        lines += ["", Text(problem, style="bold red")]
    return Group(*lines)


def _memory_line(now: Scrape) -> Text:
    """Returns the line with the used share of the KV cache, as the mean over the engines."""
    shares = now.totals_by("vllm:kv_cache_usage_perc", "engine").values()
    share = sum(shares) / len(shares) if shares else 0.0
    full = round(share * BAR)
    return _labelled_line("KV cache", f"{'█' * full}{'░' * (BAR - full)} {share:.1%}")


def _share_of_free_commits(change: Change) -> float | None:
    """Returns the share of commits that took no forward of their own; None if there were no
    commits."""
    shares = change.shares("vllm_dllm:commits_total", "forward")
    return 1 - shares.get("own", 0.0) if shares else None


RATES: Mapping[str, tuple[Callable[[Change], float | None], str]] = {
    "Tokens per second": (lambda c: c.rate("vllm:generation_tokens_total"), ".1f"),
    "Forwards per second": (lambda c: c.rate("vllm_dllm:forwards_total"), ".1f"),
    "Tokens per forward": (
        lambda c: c.ratio("vllm:generation_tokens_total", "vllm_dllm:forwards_total"),
        ".2f",
    ),
    "Canvases per forward": (
        lambda c: c.ratio("vllm_dllm:denoise_steps_total", "vllm_dllm:forwards_total"),
        ".2f",
    ),
    "Denoise steps per block": (lambda c: c.mean("vllm_dllm:block_denoise_steps"), ".2f"),
    "Seconds per block": (lambda c: c.mean("vllm_dllm:block_seconds"), ".3f"),
    "Accepted positions per step": (
        lambda c: c.ratio("vllm_dllm:accepted_positions_total", "vllm_dllm:denoise_steps_total"),
        ".1f",
    ),
    "Entropy when finished, nats": (lambda c: c.mean("vllm_dllm:block_entropy_nats"), ".4f"),
    "Commits that took no forward": (_share_of_free_commits, ".0%"),
}
"""Name of a line -> its number, and the number's format."""


def _rates_table(scrapes: Sequence[Scrape]) -> Table:
    """Returns the lines of `RATES`, with a column for the last seconds and one for all since the
    server's start."""
    recent = Change(scrapes[0], scrapes[-1])
    since_start = Change(None, scrapes[-1])
    seconds = scrapes[-1].at - scrapes[0].at
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=28)
    table.add_column(justify="right", min_width=10)
    table.add_column(justify="right", min_width=12)
    headings = ("", f"last {seconds:.0f} s", "since start")
    table.add_row(*(Text(heading, style="dim") for heading in headings))
    for name, (number, form) in RATES.items():
        numbers = (number(change) for change in (recent, since_start))
        table.add_row(name, *(NONE if n is None else format(n, form) for n in numbers))
    return table


def _shares_line(title: str, now: Scrape, name: str, label: str) -> Text:
    """Returns a line that has the share of each value of a label in a counter. `name` is the
    counter's, without prefix and `_total`."""
    shares = Change(None, now).shares(f"vllm_dllm:{name}_total", label)
    words = [
        f"{value.replace('_', ' ')} {'<1%' if share < 0.01 else format(share, '.0%')}"
        for value, share in shares.items()
    ]
    return _labelled_line(title, ", ".join(words) or NONE)


def _engines_table(now: Scrape, engines: Mapping[str, float]) -> Table:
    """Returns a table with a line for each engine. `engines` has the number of its running
    requests."""
    table = Table.grid(padding=(0, 2))
    headings = ("Engine", "running", "waiting", "forwards")
    for heading in headings:
        table.add_column(justify="left" if heading == "Engine" else "right")
    table.add_row(*(Text(heading, style="dim") for heading in headings))
    for engine, running in engines.items():
        waiting = now.total("vllm:num_requests_waiting", engine=engine)
        forwards = now.total("vllm_dllm:forwards_total", engine=engine)
        table.add_row(engine, f"{running:.0f}", f"{waiting:.0f}", f"{forwards:.0f}")
    return table


def _labelled_line(title: str, text: str) -> Text:
    """Returns a line with a title in a column of fixed width, and a text after it."""
    return Text(f"{title:<28}  {text}")
