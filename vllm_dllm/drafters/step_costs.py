"""Predicts how long a step takes with and without drafts, from the times of earlier steps."""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Step:
    """The size of a step of the target, and of the drafts after it."""

    num_rows: int
    """Tokens of decoding requests: for each request one token and the drafts to verify."""
    num_prefilled: int
    """Tokens of prompts."""
    num_drafted: int
    """Requests for which tokens are drafted at the end of the step."""

    @property
    def time_terms(self) -> tuple[float, ...]:
        """Numbers of at least 0. The step's time is estimated as a weighted sum of them."""
        drafts = self.num_drafted > 0
        return (1.0, self.num_rows, self.num_prefilled, float(drafts), self.num_drafted)


class StepCosts:
    """Fits the weights of `Step.time_terms` to the times of recent steps. Weights are at least 0.
    Errors are relative to a step's time, and slow outliers count little."""

    MEMORY = 64  # steps with drafts, and as many without: neither kind is forgotten
    LEAST = 4  # steps of each kind that a fit needs
    RIDGE = 0.03  # of the ridge that shares among the weights what the samples leave open
    ROUNDS = 3  # of a fit; each but the first knows which steps are outliers

    def __init__(self) -> None:
        # Terms and seconds of steps, by whether they drafted.
        self._samples: dict[bool, deque[tuple[tuple[float, ...], float]]] = {
            drafts: deque(maxlen=self.MEMORY) for drafts in (False, True)
        }
        self._weights: list[float] = []
        self._num_new = 0
        self.num_fits = 0

    @property
    def lacks_steps_without_drafts(self) -> bool:
        """Whether the first fit still needs steps without drafts."""
        return len(self._samples[False]) < self.LEAST

    def add_step(self, step: Step, seconds: float) -> None:
        """Remembers how long a step took. Fits again when half of the remembered steps are new."""
        self._samples[step.num_drafted > 0].append((step.time_terms, seconds))
        self._num_new += 1
        # A fit takes 0.5 ms.
        if 2 * self._num_new >= sum(map(len, self._samples.values())):
            self._fit()

    def _fit(self) -> None:
        """Fits the weights to remembered steps. Does nothing with fewer than `LEAST` of a kind."""
        if min(map(len, self._samples.values())) < self.LEAST:
            return
        samples = [sample for kind in self._samples.values() for sample in kind]
        terms = np.array([terms for terms, _ in samples])
        seconds = np.array([seconds for _, seconds in samples])
        relative = terms / seconds[:, None]
        scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-9)
        # What the samples leave open is shared among the terms instead of going to one of them.
        ridge, zeros = self.RIDGE * np.eye(len(scale)), np.zeros(len(scale))
        trust = np.ones(len(samples))  # by which a step counts
        for _ in range(self.ROUNDS):
            rows = relative / scale * trust[:, None]
            scaled, _ = nnls(np.vstack((rows, ridge)), np.append(trust, zeros))
            weights = scaled / scale
            errors = np.abs(relative @ weights - 1)
            trust = 1 / np.sqrt(np.maximum(errors / max(np.median(errors), 1e-3), 1))
        self._weights, self._num_new = weights.tolist(), 0
        self.num_fits += 1

    @property
    def are_known(self) -> bool:
        """Whether there has been a fit, which `predict_seconds` needs."""
        return self.num_fits > 0

    def predict_seconds(self, num_rows: float, num_drafted: int) -> float:
        """Returns the seconds that a step without prefill takes. Needs `are_known`."""
        base, row, _, any_draft, draft = self._weights
        return base + row * num_rows + any_draft * (num_drafted > 0) + draft * num_drafted


class StepClock:
    """Times the steps of a busy engine: from the previous step's answer to each one's own."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Starts without any step. `now`: returns seconds."""
        self._now = now
        self._scheduled: deque[tuple[Step, Collection[str]]] = deque()
        self._last_answer = 0.0  # seconds on the clock
        self._last_requests: Collection[str] = ()

    def step_scheduled(self, step: Step, request_ids: Collection[str]) -> None:
        """Remembers a step that is sent to the worker, with the requests in it."""
        self._scheduled.append((step, request_ids))

    def step_answered(self) -> tuple[Step, float] | None:
        """Returns the step whose answer has come, which is the oldest remembered one, and its
        seconds. Returns None if the step has no request of the previous step: the engine may have
        been idle between the two."""
        step, request_ids = self._scheduled.popleft()
        now = self._now()
        seconds = now - self._last_answer
        was_idle = set(self._last_requests).isdisjoint(request_ids)
        self._last_answer, self._last_requests = now, request_ids
        return None if was_idle else (step, seconds)
