"""Progress bars for commands that take minutes."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
