"""A span of OpenTelemetry for each finished canvas of a request. docs/metrics.md explains them."""

import time
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from vllm.v1.request import Request

from vllm_dllm.compat import spans
from vllm_dllm.metrics.canvas_numbers import CanvasRow

NAME = "diffusion_block"
PREFIX = "vllm_dllm."


@dataclass
class _Blocks:
    began_s: float = 0.0  # of the canvas that the request is at; monotonic clock
    accepted: int = 0  # positions, summed over its steps
    finished: list[spans.Span] = field(default_factory=list)


class BlockSpans:
    """For a scheduler of a server that traces."""

    def __init__(self) -> None:
        self._blocks: WeakKeyDictionary[Request, _Blocks] = WeakKeyDictionary()

    def denoised(
        self,
        request: Request,
        row: CanvasRow,
        began_s: float,  # monotonic clock, when the step was scheduled
    ) -> None:
        """A step of `request`, before its output is made."""
        blocks = self._blocks.setdefault(request, _Blocks())
        if row.step == 1:
            blocks.began_s, blocks.accepted = began_s, 0
        blocks.accepted += row.accepted
        if row.cause is None:
            return
        epoch_s = time.time() - time.monotonic()
        attributes = {
            f"{PREFIX}block": len(blocks.finished),
            f"{PREFIX}denoise_steps": row.step,
            f"{PREFIX}accepted_positions": blocks.accepted,
            f"{PREFIX}positions": row.length,
            f"{PREFIX}entropy_nats": row.entropy_nats,
            f"{PREFIX}cause": row.cause,
        }
        start_ns = int((epoch_s + blocks.began_s) * 1e9)
        blocks.finished.append(spans.Span(NAME, start_ns, time.time_ns(), attributes))
        spans.send(request, blocks.finished)
