"""Numbers of a step's canvases, which the worker sends to the engine with the tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class CanvasRow(NamedTuple):
    """Numbers of one canvas in a step."""

    request: int  # index in the step's batch
    length: int  # canvas positions
    step: int  # 1-based; 0: the canvas was not denoised, but committed or taken back
    accepted: int  # positions
    entropy_nats: float  # mean over the canvas
    cause: str | None  # why it is finished; None: it is not

    @property
    def is_denoised(self) -> bool:
        """Whether the step has denoised the canvas, not committed it or taken it back."""
        return self.step > 0


class CanvasNumbers(NamedTuple):
    """Numbers of a step's n canvases. Only `values` is not known before the step has run. Most
    fields are lists, because sending small arrays between processes takes longer."""

    requests: list[int]  # [n] indices in the step's batch
    lengths: list[int]  # [n] canvas positions
    names: tuple[str, ...]  # names of the rows of `values`
    values: np.ndarray  # [names, n] fp32; valid when the step's tokens are
    cut: Sequence[int] = ()  # indices in the step's batch: requests whose answer is cut and closed
    sampling_peak_bytes: int = 0  # most that this and all earlier steps took
    sampling_bound_bytes: int = 0  # most that a step may take

    def requests_flagged(self, name: str) -> Iterator[int]:
        """Yields the indices, in the step's batch, of requests whose flag `name` is set.
        "committed": the step has finished and committed their block. "verified": it has verified
        their draft."""
        if name in self.names:
            flags = self.values[self.names.index(name)].tolist()
            yield from (request for request, flag in zip(self.requests, flags, strict=True) if flag)

    def rows(self) -> Iterator[CanvasRow]:
        """Yields the numbers of each canvas. Call it when the step's tokens are valid."""
        # Plain Python: between steps numpy's code is not in the caches.
        columns = dict(zip(self.names, self.values.tolist(), strict=True))
        causes = [cause for cause in ("converged", "revealed") if cause in columns]
        denoises, finished = columns["denoises"], columns["finished"]
        for i, (request, length) in enumerate(zip(self.requests, self.lengths, strict=True)):
            cause = None
            if finished[i]:
                cause = next((name for name in causes if columns[name][i]), "step_cap")
            yield CanvasRow(
                request,
                length,
                int(columns["step"][i]) if denoises[i] else 0,
                int(columns["accepted"][i]),
                columns["entropy"][i] / length,
                cause,
            )
