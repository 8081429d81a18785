"""What tensor-parallel workers send each other in sampling steps, and what they make of the
grammars of their requests."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_dllm.step.asked.grammars import CanvasGrammars, Legal


class WatchWorkers:
    """vLLM mixes this into its workers (`worker_extension_cls`); called with `collective_rpc`."""

    model_runner: Any  # the worker's

    def watch_exchanges(self) -> None:
        """From now on, in every sampling step."""
        self._shapes: list[tuple[int, ...]] = []
        self._is_sampling = False
        sampler, group = type(self.model_runner.sampler), get_tp_group()
        sample = sampler.__call__

        @wraps(sample)
        def sampling(*args: Any, **kwargs: Any) -> Any:
            self._is_sampling = True
            try:
                return sample(*args, **kwargs)
            finally:
                self._is_sampling = False

        sampler.__call__ = sampling
        for name in ("all_gather", "all_reduce"):
            setattr(group, name, self._noting(getattr(group, name)))

    def exchanges(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors that this worker sent."""
        return self._shapes

    def watch_grammars(self) -> None:
        """From now on, in every step."""
        self._paths: list[Any] = []
        legal = CanvasGrammars.find_legal_paths

        @wraps(legal)
        def watched(grammars: CanvasGrammars, *args: Any, **kwargs: Any) -> Legal:
            found = legal(grammars, *args, **kwargs)
            plans = {slot: answer.next_forced for slot, answer in grammars._answers.items()}
            self._paths.append((found.guess.tolist(), found.logprob.tolist(), plans))
            return found

        CanvasGrammars.find_legal_paths = watched

    def grammar_paths(self) -> list[Any]:
        """Of each step: the paths, their log-probabilities and what begins the canvas behind."""
        return self._paths

    def _noting(self, send: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._is_sampling:
                self._shapes.append(tuple(tensor.shape))
            return send(tensor, *args, **kwargs)

        return noting


WATCHED_WORKERS = {"worker_extension_cls": "tests.engine.workers.WatchWorkers"}
