"""Progress bars of commands that work through many equal parts."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bars(console: Console | None = None) -> Progress:
    """Makes one line per task: what it does, a bar, parts done of all, time left.

    They stay on stderr; with a `console`, they are on it while they move, if it is a terminal.
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
