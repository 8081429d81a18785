"""A running record of the canvases, for people to watch: one JSON line a request and step."""

import json
from pathlib import Path

from vllm.logger import init_logger

from vllm_dllm.config.files import LineFile
from vllm_dllm.step.watched.canvas_record import CanvasRecord

logger = init_logger(__name__)


class CanvasTrace:
    """Appends to a file; reading it while it grows is safe, a line is written at once. Lines that
    the disk does not take are dropped.

    Each line holds `request_id`, `step` (1-based), `tokens` (best guess, one a canvas position),
    `accepted` (0/1 a position), `canvas` (what its next step reads), `entropy` (mean, nats) and
    `finished`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = LineFile(Path(path))
        self._has_warned = False

    def write(self, request_id: str, record: CanvasRecord) -> None:
        line = {
            "request_id": request_id,
            "step": record.step,
            "tokens": record.tokens,
            "accepted": record.accepted,
            "canvas": record.next_canvas,
            "entropy": record.mean_entropy,
            "finished": record.finished,
        }
        self._append(json.dumps(line).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            self._file.append(line)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "A line of the trace was dropped, and more may follow: cannot write to %s: %s.",
                    self._path,
                    error.strerror,
                )
