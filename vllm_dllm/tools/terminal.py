"""What commands show on a terminal while they work."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vllm_dllm.tools.server_process import Server

WIDEST = 1000  # columns; no table is as wide


def make_console(piped_columns: int) -> Console:
    """Returns a console on standard output. Lines have `piped_columns` characters if that is not a
    terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else piped_columns)


def format_size(num_bytes: int) -> str:
    """Returns a size in bytes, KiB, MiB or GiB, with a column's width."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:6.4g} {units[0]:3}"


def print_table(console: Console, table: Table) -> None:
    """Prints a table in which no number is cut. On a terminal that is too narrow its lines go past
    the edge."""
    needed = console.measure(table, options=console.options.update(width=WIDEST)).minimum
    table.width = needed if needed > console.width else None
    console.print(table, crop=False)


def progress_bars(console: Console | None = None) -> Progress:
    """Returns a display with one line per task: description, bar, parts done of all, time left.

    Without a `console` the lines are drawn on stderr and stay. With a `console` they are drawn
    there if it is a terminal, and vanish at the end.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console or Console(file=sys.stderr),
        transient=console is not None,
        disable=console is not None and not console.is_terminal,
    )


def wait_on_console(server: Server, console: Console) -> float:
    """Waits until the server answers, and returns the seconds that it took. On a terminal it shows
    the seconds and the last line of the server's log. Raises ServerError if the server ends."""
    if not console.is_terminal or console.is_dumb_terminal:
        return server.wait_until_ready(lambda seconds: None)
    with console.status("") as status:

        def show_wait(seconds: float) -> None:
            last = "".join(server.log.read_text(errors="replace").splitlines()[-1:])
            text = Text(f"{seconds:3.0f} s  {last}")
            text.truncate(console.width - 2, overflow="ellipsis")  # beside the spinner
            status.update(text)

        return server.wait_until_ready(show_wait)
