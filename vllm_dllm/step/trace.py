"""A running record of the canvases, for people to watch: one JSON line a request and step."""

import json

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.step.batch import CanvasBatch


class CanvasTrace:
    """Appends to a file; reading it while it grows is safe, a line is written at once.

    Each line holds `request_id`, `step` (1-based), `tokens` (best guess, one a canvas position),
    `accepted` (0/1 a position), `canvas` (what its next step reads), `entropy` (mean, nats) and
    `finished`.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the server)

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
            self._file.write(json.dumps(line) + "\n")
