"""How long a step takes with and without drafts, learnt from the steps so far."""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Step:
    num_rows: int
    """Tokens of decoding requests: one each, plus the drafts that are verified."""
    num_prefilled: int
    """Tokens of prompts."""
    num_drafted: int
    """Requests drafted for at the end of the step."""

    @property
    def parts(self) -> tuple[float, ...]:
        """The terms of its time, up to factors; each at least 0."""
        drafts = self.num_drafted > 0
        return (1.0, self.num_rows, self.num_prefilled, float(drafts), self.num_drafted)


class StepCosts:
    """Fits seconds to `Step.parts`: factors of at least 0 that explain recent steps, with errors
    relative to a step's time, and little weight for slow outliers."""

    MEMORY = 64  # steps of each kind, so that a kind that no longer occurs is not forgotten
    LEAST = 4  # steps of each kind needed before a fit
    RIDGE = 0.03

    def __init__(self) -> None:
        self._samples: dict[bool, deque[tuple[tuple[float, ...], float]]] = {
            drafts: deque(maxlen=self.MEMORY) for drafts in (False, True)
        }
        self._factors: list[float] = []
        self._num_new = 0
        self.num_fits = 0

    @property
    def lacks_steps_without_drafts(self) -> bool:
        return len(self._samples[False]) < self.LEAST

    def add(self, step: Step, seconds: float) -> None:
        self._samples[step.num_drafted > 0].append((step.parts, seconds))
        self._num_new += 1
        # A fit takes 0.5 ms.
        if 2 * self._num_new >= sum(map(len, self._samples.values())):
            self._fit()

    def _fit(self) -> None:
        if min(map(len, self._samples.values())) < self.LEAST:
            return
        samples = [sample for kind in self._samples.values() for sample in kind]
        parts = np.array([parts for parts, _ in samples])
        seconds = np.array([seconds for _, seconds in samples])
        relative = parts / seconds[:, None]
        scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-9)
        # What the samples leave open is shared among the parts instead of going to one of them.
        shared, nothing = self.RIDGE * np.eye(len(scale)), np.zeros(len(scale))
        weights = np.ones(len(samples))
        for _ in range(3):
            rows = relative / scale * weights[:, None]
            factors, _ = nnls(np.vstack((rows, shared)), np.append(weights, nothing))
            errors = np.abs(relative @ (factors / scale) - 1)
            weights = 1 / np.sqrt(np.maximum(errors / max(np.median(errors), 1e-3), 1))
        self._factors, self._num_new = (factors / scale).tolist(), 0
        self.num_fits += 1

    @property
    def known(self) -> bool:
        """Whether there is enough data for `seconds`."""
        return self.num_fits > 0

    def seconds(self, num_rows: float, num_drafted: int) -> float:
        """What a step without prefill takes."""
        base, row, _, any_draft, draft = self._factors
        return base + row * num_rows + any_draft * (num_drafted > 0) + draft * num_drafted


class StepClock:
    """Times the steps of a busy engine: the time from one step's answer to the next."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._scheduled: deque[tuple[Step, Collection[str]]] = deque()
        self._last: tuple[float, Collection[str]] = (0.0, ())

    def scheduled(self, step: Step, request_ids: Collection[str]) -> None:
        self._scheduled.append((step, request_ids))

    def arrived(self) -> tuple[Step, float] | None:
        """The oldest step on its way has been answered. Returns it and the seconds it took, or None
        if the engine may have been idle before it."""
        step, request_ids = self._scheduled.popleft()
        (since, before), self._last = self._last, (self._now(), request_ids)
        if set(before).isdisjoint(request_ids):
            return None
        return step, self._last[0] - since
