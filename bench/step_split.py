"""Where the time of an engine step goes, measured inside the worker process.

A step lasts from one call of the worker to the next, so everything is in it: scheduling, messages
between the processes, preparing inputs, the model's forward, logits, sampling.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any


class StepSplit:
    """vLLM mixes this into its worker (`worker_extension_cls`); called with `collective_rpc`."""

    model_runner: Any  # the worker's

    _forwards: int | None = None

    def num_forwards(self) -> int:
        """How often the model has run since this was first called."""
        if self._forwards is None:
            self._forwards = 0

            def increment(*_: Any) -> None:
                assert self._forwards is not None
                self._forwards += 1

            self.model_runner.model.register_forward_hook(increment)
        return self._forwards

    def start_split(self) -> None:
        """From now on each step leaves a row in `self._split_steps`: times in ms."""
        self._split_steps: list[dict[str, float]] = []
        self._split_undo: list[Callable[[], None]] = []
        model = self.model_runner.model
        forward_started = 0.0

        def before(*_: Any) -> None:
            nonlocal forward_started
            forward_started = time.perf_counter()

        def after(*_: Any) -> None:
            self._split_add("forward", time.perf_counter() - forward_started)

        for handle in (
            model.register_forward_pre_hook(before),
            model.register_forward_hook(after),
        ):
            self._split_undo.append(handle.remove)
        self._split_time(model, "compute_logits", "logits")
        self._split_time(self, "sample_tokens", "sample_tokens")
        self._split_time(self, "execute_model", "execute_model", is_start=True)

    def stop_split(self) -> list[dict[str, float]]:
        """The steps that ran the model and were followed by another one."""
        for undo in self._split_undo:
            undo()
        steps = self._split_steps
        for step, following in pairwise(steps):
            step["step"] = following["started"] - step["started"]
        return [step for step in steps if "step" in step and "forward" in step]

    def _split_add(self, name: str, seconds: float) -> None:
        if self._split_steps:
            row = self._split_steps[-1]
            row[name] = row.get(name, 0.0) + 1000 * seconds

    def _split_time(self, owner: Any, method: str, name: str, is_start: bool = False) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            if is_start:
                self._split_steps.append({"started": 1000 * started})
            try:
                return inner(*args, **kwargs)
            finally:
                self._split_add(name, time.perf_counter() - started)

        setattr(owner, method, timed)
        self._split_undo.append(lambda: delattr(owner, method))


def split_parts(step: dict[str, float]) -> dict[str, float]:
    """Adds up to the step: what each part took, in ms."""
    forward, logits = step["forward"], step.get("logits", 0.0)
    sampling = step.get("sample_tokens", 0.0)
    prepare = step["execute_model"] - forward
    if sampling >= logits:  # logits are computed inside of it
        sampling -= logits
    else:
        prepare -= logits
    return {
        "model_forward_ms": forward,
        "logits_ms": logits,
        "sample_ms": sampling,
        "prepare_ms": prepare,
        "schedule_and_messages_ms": step["step"] - forward - logits - sampling - prepare,
    }
