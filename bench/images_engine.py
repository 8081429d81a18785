"""Our engine for `bench.images`, with the vision tower or without it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from bench.engine import CanvasEngine
from bench.images_shape import CANVAS, MAX_MODEL_LEN, prompts, text
from bench.step_split import StepSplit
from tests.engine.one_step import read_one_step


class ImageProbe(StepSplit):
    """vLLM mixes this into its worker (`worker_extension_cls`); called with `collective_rpc`."""

    execute_model: Callable[..., Any]  # the worker's
    _ms: dict[str, float] | None = None

    def image_ms(self) -> dict[str, float]:
        """Of the tower and of whole steps, since this was last called."""
        if self._ms is None:
            self._time(self.model_runner.model, "embed_multimodal", "tower_ms")
            self._time(self, "execute_model", "steps_ms")
        found, self._ms = self._ms or {}, {"tower_ms": 0.0, "steps_ms": 0.0}
        return found

    def _time(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                assert self._ms is not None
                self._ms[name] += 1000 * (time.perf_counter() - started)

        setattr(owner, method, timed)


class ImagesEngine(CanvasEngine):
    def __init__(self, checkpoint: str, eager: bool, sees: bool = True) -> None:
        self.folder = Path(checkpoint)
        options: dict[str, Any] = {} if sees else {"limit_mm_per_prompt": {"image": 0}}
        super().__init__(
            checkpoint,
            CANVAS,
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=eager,
            worker_extension_cls="bench.images_engine.ImageProbe",
            **options,
        )

    def prefill(self, count: int, seed: int) -> dict[str, float]:
        """Times of prompts with an image each, sent together. One position is denoised once behind
        each: an engine does not prefill alone."""
        inputs = [prompt.engine_input for prompt in prompts(self.folder, count, seed)]
        one_step = {"diffusion_max_steps": 1, "diffusion_canvas_length": 1}
        params = SamplingParams(max_tokens=1, extra_args=one_step)
        self.llm.collective_rpc("image_ms")
        self.llm.generate(inputs, params, use_tqdm=False)
        found = self.llm.collective_rpc("image_ms")[0]
        return {"tower_ms": found["tower_ms"], "prefill_ms": found["steps_ms"]}

    def read(self, count: int, seed: int) -> list[list[tuple[list[int], list[float]]]]:
        """(tokens, log-probabilities) at each position of each canvas, the most probable ones."""
        canvases = [text(CANVAS, i) for i in range(count)]
        read = read_one_step(self, prompts(self.folder, count, seed), canvases)  # type: ignore[arg-type]
        return [[(list(at), list(at.values())) for at in positions] for positions in read]

    def write(self, count: int, seed: int) -> dict[str, Any]:
        """Answers to prompts of text alone, two canvases of four steps each."""
        asked = [text(128, 1000 * seed + i) for i in range(count)]
        xargs = {"diffusion_max_steps": 4}
        run = self.run(asked, count, 2 * CANVAS, ignore_eos=True, seed=seed, extra_args=xargs)
        tokens = sum(map(len, run["outputs"]))
        return {"tokens_per_second": tokens / run["seconds"], "outputs": run["outputs"]}
