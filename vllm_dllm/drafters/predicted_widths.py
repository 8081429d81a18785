"""What the predictor said, on its way from the device."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch


class PredictedWidths(Mapping[str, int]):
    """Widths on their way from the device, by request. Reading waits for them, and so does sending
    them to another process."""

    def __init__(self, request_ids: list[str], widths: torch.Tensor) -> None:
        """`widths` [num_reqs] int64; starts to copy them."""
        self._request_ids = request_ids
        self._widths = widths.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if widths.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @cached_property
    def _known(self) -> dict[str, int]:
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._request_ids, self._widths.tolist(), strict=True))

    def __getitem__(self, request_id: str) -> int:
        return self._known[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._request_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._known,)
