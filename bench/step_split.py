"""Where the time of an engine step goes, measured inside the worker process.

A step lasts from one call of the worker to the next, so everything is in it: scheduling, messages
between the processes, preparing inputs, the model, sampling.

The model's forward is what the reference's `forward` computes: token embeddings, soft embeddings of
the last prediction, self-conditioning, the layers and the logits. An engine calls these one by one.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

LAYERS = "layers"
MODEL_PARTS = {  # methods of the model, where it has them; the layers are its `forward`
    "embed_input_ids": "embeddings",
    "soft_embeddings": "soft_embeddings",
    "self_conditioning": "self_conditioning",
    "compute_logits": "logits",
}
DRAFT, DRAFT_LOGITS = "draft", "draft_logits"  # the drafter's logits are part of the draft
PHASES = ("execute_model", "sample_tokens")  # of the worker; both may run parts of the model


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
        self._split_phase = ""
        model = self.model_runner.model
        self._split_time(model, "forward", LAYERS)
        for method, name in MODEL_PARTS.items():
            if hasattr(model, method):
                # A module is timed by its forward: hooks and compiled calls go through it.
                part = getattr(model, method)
                owner, method = (part, "forward") if hasattr(part, "forward") else (model, method)
                self._split_time(owner, method, name)
        if (speculator := getattr(self.model_runner, "speculator", None)) is not None:
            self._split_time(speculator.model, "compute_logits", DRAFT_LOGITS)
            self._split_time(speculator, "propose", DRAFT)
        for phase in PHASES:
            self._split_time(self, phase, phase)

    def stop_split(self) -> list[dict[str, float]]:
        """The steps that ran the model and were followed by another one."""
        for undo in self._split_undo:
            undo()
        steps = self._split_steps
        for step, following in pairwise(steps):
            step["step"] = following["started"] - step["started"]
        return [step for step in steps if "step" in step and LAYERS in step]

    def _split_time(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            outer = self._split_phase
            if name in PHASES:
                self._split_phase = name
            if name == PHASES[0]:
                self._split_steps.append({"started": 1000 * started})
            try:
                return inner(*args, **kwargs)
            finally:
                milliseconds = 1000 * (time.perf_counter() - started)
                times = {name: milliseconds}
                if name not in PHASES:
                    times[f"model in {outer}"] = milliseconds
                elif outer:  # our worker samples inside `execute_model`
                    times[outer] = -milliseconds
                self._split_phase = outer
                for row in self._split_steps[-1:]:
                    for key, value in times.items():
                        row[key] = row.get(key, 0.0) + value

        setattr(owner, method, timed)
        self._split_undo.append(lambda: delattr(owner, method))


def split_parts(step: dict[str, float]) -> dict[str, float]:
    """What each part took, in ms; adds up to the step."""
    model = {f"{name}_ms": step.get(name, 0.0) for name in (LAYERS, *MODEL_PARTS.values())}
    prepare, sample = (step.get(p, 0.0) - step.get(f"model in {p}", 0.0) for p in PHASES)
    return {
        **model,
        "prepare_ms": prepare,
        "sample_ms": sample,
        "schedule_and_messages_ms": step["step"] - prepare - sample - sum(model.values()),
    }


def outside_forward(parts: dict[str, float]) -> float:
    """The time of a step outside the model's forward, in ms."""
    return parts["prepare_ms"] + parts["sample_ms"] + parts["schedule_and_messages_ms"]
