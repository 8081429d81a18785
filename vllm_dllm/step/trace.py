"""A running record of the canvases, for people to watch: one JSON line a request and step."""

import json
from pathlib import Path

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.files import LineFile
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.step.batch import CanvasBatch

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

    def record(
        self,
        input_batch: InputBatch,
        batch: CanvasBatch,
        stats: RowStats,  # fields [n, C]
        outcome: StepOutcome,
        canvas: torch.Tensor,  # [n, C] int64
        denoising: torch.Tensor,  # [n] bool
        finished: torch.Tensor,  # [n] bool
    ) -> None:
        """Writes this step's denoised canvases. Waits for the device."""
        tokens, accepted = outcome.state.best_guess.tolist(), outcome.accepted.int().tolist()
        entropy = (stats.entropy_nats.sum(-1) / batch.lengths).tolist()
        next_canvas = canvas.tolist()
        steps = outcome.state.steps_done.tolist()
        for i, is_denoising in enumerate(denoising.tolist()):
            if not is_denoising:
                continue
            length = int(batch.lengths_np[i])
            line = {
                "request_id": input_batch.req_ids[int(batch.requests_np[i])],
                "step": steps[i],
                "tokens": tokens[i][:length],
                "accepted": accepted[i][:length],
                "canvas": next_canvas[i][:length],
                "entropy": entropy[i],
                "finished": bool(finished[i]),
            }
            self._write(json.dumps(line).encode() + b"\n")

    def _write(self, line: bytes) -> None:
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
