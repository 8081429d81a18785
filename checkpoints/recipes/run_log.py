"""The clock, the log and the save times of a training run with a budget in minutes.

The budget sets a run's length, so its schedule follows the clock on any machine.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG_FILE = "training_log.json"
Entry = dict[str, Any]


def earlier_log(checkpoint: Path | None) -> list[Entry]:
    """The log of the runs that made `checkpoint`; steps count on from it, minutes start at 0."""
    path = checkpoint / LOG_FILE if checkpoint else None
    return json.loads(path.read_text()) if path and path.exists() else []


def write_log(log: list[Entry], checkpoint: Path) -> None:
    (checkpoint / LOG_FILE).write_text(json.dumps(log))


class RunLog:
    """Clock, steps and log of one run, which saves its model now and then."""

    def __init__(
        self,
        earlier: list[Entry],  # what the log begins with
        *,
        minutes: float,  # the budget
        log_every: int,  # steps
        save_minutes: float,
        save: Callable[[], None],
    ) -> None:
        self.entries = list(earlier)
        self.step = earlier[-1]["step"] if earlier else 0
        self.seconds = 0.0  # since this run began
        self._budget_s = 60 * minutes
        self._log_every = log_every
        self._save_s = 60 * save_minutes
        self._save = save
        self._start = self._last_save = time.monotonic()

    def tick(self) -> float:
        """Reads the clock. Returns how far the run is, from 0 to 1."""
        self.seconds = time.monotonic() - self._start
        return min(1.0, self.seconds / self._budget_s)

    def count_step(self) -> bool:
        """Whether the log is due an entry after this step."""
        self.step += 1
        return self.step % self._log_every == 0

    def add(self, entry: Entry, shown: str) -> None:
        """Logs `entry`, with step and minutes, and prints a line about it."""
        self.entries.append({"step": self.step, **entry, "minutes": self.seconds / 60})
        left = (self._budget_s - self.seconds) / 60
        print(f"step {self.step} {shown} ETA {left:.1f} min", flush=True)

    def save_now_and_then(self) -> None:
        if time.monotonic() - self._last_save > self._save_s:
            self._save()
            self._last_save = time.monotonic()

    def finish(self, checkpoint: Path) -> None:
        """Saves the model, and the log next to it."""
        self._save()
        write_log(self.entries, checkpoint)
