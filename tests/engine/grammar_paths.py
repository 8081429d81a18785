"""What tensor-parallel workers make of the grammars of their requests, step by step."""

from functools import wraps
from typing import Any

from vllm_dllm.step.asked.grammars import CanvasGrammars, Legal


class WatchGrammars:
    """vLLM mixes this into its workers (`worker_extension_cls`); called with `collective_rpc`."""

    def watch_grammars(self) -> None:
        """From now on, in every step."""
        self._paths: list[Any] = []
        legal = CanvasGrammars.legal

        @wraps(legal)
        def watched(grammars: CanvasGrammars, *args: Any, **kwargs: Any) -> Legal:
            found = legal(grammars, *args, **kwargs)
            plans = {slot: answer.next_forced for slot, answer in grammars._answers.items()}
            self._paths.append((found.guess.tolist(), found.logprob.tolist(), plans))
            return found

        CanvasGrammars.legal = watched

    def grammar_paths(self) -> list[Any]:
        """Of each step: the paths, their log-probabilities and what begins the canvas behind."""
        return self._paths


WATCHED_GRAMMARS = {"worker_extension_cls": "tests.engine.grammar_paths.WatchGrammars"}
