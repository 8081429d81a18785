"""What a step's canvases have come to, as the worker tells the engine with the tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class CanvasRow(NamedTuple):
    """Of one canvas."""

    request: int  # index in the step's batch
    length: int  # canvas positions
    step: int  # 1-based; 0: the canvas was not denoised, but committed or taken back
    accepted: int  # positions
    entropy_nats: float  # mean over the canvas
    cause: str | None  # why it is finished; None: it is not


class CanvasNumbers(NamedTuple):
    requests: np.ndarray  # [n] int64, indices in the step's batch
    lengths: np.ndarray  # [n] int64, canvas positions
    columns: tuple[str, ...]
    values: np.ndarray  # [n, columns] fp32; there when the step's tokens are

    def rows(self) -> Iterator[CanvasRow]:
        # Plain Python: between steps numpy's code is not in the caches.
        requests, lengths = self.requests.tolist(), self.lengths.tolist()
        for request, length, values in zip(requests, lengths, self.values.tolist(), strict=True):
            of = dict(zip(self.columns, values, strict=True))
            yield CanvasRow(
                request,
                length,
                int(of["step"]),
                int(of["accepted"]),
                of["entropy"] / length,
                _cause(of) if of["finished"] else None,
            )


def _cause(of: dict[str, float]) -> str:
    for cause in ("converged", "revealed"):
        if of.get(cause):
            return cause
    return "step_cap"
