"""The log of a training run, kept beside the weights."""

import json
from pathlib import Path
from typing import Any

LOG_FILE = "training_log.json"
Entry = dict[str, Any]


def earlier_log(checkpoint: Path | None) -> list[Entry]:
    """The log of the runs that made `checkpoint`; steps count on, minutes do not."""
    path = checkpoint / LOG_FILE if checkpoint else None
    return json.loads(path.read_text()) if path and path.exists() else []


def write_log(log: list[Entry], checkpoint: Path) -> None:
    (checkpoint / LOG_FILE).write_text(json.dumps(log))
