"""What tensor-parallel workers make of the grammars of their requests."""

from functools import wraps
from typing import Any

from vllm_dllm.step.asked.grammars import CanvasGrammars, Legal


class WatchWorkers:
    """vLLM mixes this into its workers (`worker_extension_cls`); called with `collective_rpc`."""

    model_runner: Any  # the worker's

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


WATCHED_WORKERS = {"worker_extension_cls": "tests.engine.workers.WatchWorkers"}
