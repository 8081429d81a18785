"""Predicts how long a step takes with and without drafts, from the steps so far."""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Step:
    """The size of a step."""

    num_rows: int
    """Tokens of decoding requests: one each, and the drafts to verify."""
    num_prefilled: int
    """Tokens of prompts."""
    num_drafted: int
    """Requests that are drafted for at the end of the step."""

    @property
    def time_terms(self) -> tuple[float, ...]:
        """Numbers of at least 0, of which the step's time is a weighted sum."""
        drafts = self.num_drafted > 0
        return (1.0, self.num_rows, self.num_prefilled, float(drafts), self.num_drafted)


class StepCosts:
    """Fits the weights of `Step.time_terms` to the times of recent steps. Weights are at least 0,
    errors relative to a step's time, and slow outliers count little."""

    MEMORY = 64  # steps of each kind, so that a kind that no longer occurs is not forgotten
    LEAST = 4  # steps of each kind needed before a fit
    RIDGE = 0.03

    def __init__(self) -> None:
        self._samples: dict[bool, deque[tuple[tuple[float, ...], float]]] = {
            drafts: deque(maxlen=self.MEMORY) for drafts in (False, True)
        }  # terms and seconds of steps, by whether they drafted
        self._factors: list[float] = []
        self._num_new = 0
        self.num_fits = 0

    @property
    def lacks_steps_without_drafts(self) -> bool:
        """Whether a fit still needs steps without drafts."""
        return len(self._samples[False]) < self.LEAST

    def add_step(self, step: Step, seconds: float) -> None:
        """Remembers how long a step took; fits again when half of the steps are new."""
        self._samples[step.num_drafted > 0].append((step.time_terms, seconds))
        self._num_new += 1
        # A fit takes 0.5 ms.
        if 2 * self._num_new >= sum(map(len, self._samples.values())):
            self._fit()

    def _fit(self) -> None:
        """Fits the weights to the remembered steps, if there are enough of both kinds."""
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
    def are_known(self) -> bool:
        """Whether there have been enough steps for `predict_seconds`."""
        return self.num_fits > 0

    def predict_seconds(self, num_rows: float, num_drafted: int) -> float:
        """Returns how long a step without prefill takes."""
        base, row, _, any_draft, draft = self._factors
        return base + row * num_rows + any_draft * (num_drafted > 0) + draft * num_drafted


class StepClock:
    """Times the steps of a busy engine, each from the previous step's answer to its own."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._scheduled: deque[tuple[Step, Collection[str]]] = deque()
        self._last: tuple[float, Collection[str]] = (0.0, ())

    def step_scheduled(self, step: Step, request_ids: Collection[str]) -> None:
        """Remembers a step that is sent to the worker."""
        self._scheduled.append((step, request_ids))

    def step_answered(self) -> tuple[Step, float] | None:
        """Returns the step whose answer has come, which is the oldest of those remembered, and the
        seconds it took. Returns None if the engine may have been idle before: it has no request of
        the previous step."""
        step, request_ids = self._scheduled.popleft()
        (since, before), self._last = self._last, (self._now(), request_ids)
        if set(before).isdisjoint(request_ids):
            return None
        return step, self._last[0] - since
