"""The systems of `bench.cpu_sizes`: this project's engine, and transformers, each on all cores."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine import CanvasEngine
from bench.full_shape_engine import WorkerProbe
from bench.transformers_generate import Reference

KV_CACHE_BYTES = 1 << 29  # 32 requests with 10,240 tokens in fp32 take 450 MB of the 267M model
FIRST_ID, LAST_ID = 10, 2000  # of the drawn prompts; every vocabulary has them


def draw_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


class SizesProbe(WorkerProbe):
    """Knows how many rows a step had, and when it ended."""

    sample_tokens: Callable[..., Any]  # the worker's
    _steps: list[list[float]] | None = None
    """Rows, start and end in ms."""

    def num_forwards(self) -> int:
        if self._steps is None:
            steps: list[list[float]] = []
            self._steps = steps
            execute, sample = self.execute_model, self.sample_tokens

            def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                if rows := scheduled.total_num_scheduled_tokens:
                    now = 1000 * time.perf_counter()
                    if steps:
                        steps[-1][2] = now
                    steps.append([rows, now, now])
                return execute(scheduled, *args, **kwargs)

            def sampled(*args: Any, **kwargs: Any) -> Any:
                found = sample(*args, **kwargs)
                steps[-1][2] = 1000 * time.perf_counter()
                return found

            self.execute_model, self.sample_tokens = timed, sampled
        return len(self._steps)

    def canvas_steps_ms(self, first: int, canvas: int, count: int) -> list[float]:
        """Of the steps from number `first` on that held canvases alone, those with the most. Each
        lasts until the next one starts, the last one until its own end. Requests reach the engine
        one by one, so the first may be a step ahead: where a step lacks it, the time is scaled up.
        """
        assert self._steps is not None
        alone = [step for step in self._steps[first:] if step[0] % canvas == 0]
        alone = [step for step in alone if step[0] <= count * canvas]
        most = max(rows for rows, *_ in alone)
        scale = count * canvas / most
        return [scale * (end - start) for rows, start, end in alone if rows == most]

    def resident_bytes(self) -> int:
        """Of this process, now. Kernels keep weights where no parameter shows them."""
        return resident_bytes()


class SizesEngine(CanvasEngine):
    def __init__(
        self,
        checkpoint: str,
        canvas_length: int,
        dtype: str,
        eager: bool = False,
        max_num_seqs: int = 32,
        max_model_len: int = 1024,
    ) -> None:
        super().__init__(
            checkpoint,
            canvas_length,
            dtype=dtype,
            enforce_eager=eager,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_seqs * canvas_length + 2048,
            worker_extension_cls="bench.cpu_sizes_systems.SizesProbe",
        )

    def steps(self, count: int, prompt: int, canvas: int, steps: int, seed: int) -> dict[str, Any]:
        """`count` requests at once, each of one canvas that takes `steps` steps. The first also
        holds prompts, whose length must be no multiple of the canvas', and is not timed."""
        ask = self.llm.collective_rpc
        first = ask("num_forwards")[0]
        ask("start_peak_memory")
        found = self.run(
            draw_prompts(count, prompt, seed),
            batch=count,
            max_tokens=canvas,
            ignore_eos=True,
            detokenize=False,
            extra_args={"diffusion_max_steps": steps, "diffusion_canvas_length": canvas},
        )
        assert [len(output) for output in found["outputs"]] == [canvas] * count
        return {
            "steps_ms": ask("canvas_steps_ms", args=(first, canvas, count))[0],
            "seconds": found["seconds"],
            "resident_bytes": ask("resident_bytes")[0],
            "peak_bytes": ask("peak_memory")[0],
        }


class SizesReference(Reference):
    def steps(self, count: int, prompt: int, canvas: int, steps: int, seed: int) -> dict[str, Any]:
        """As `SizesEngine.steps`; the prompts have a forward of their own."""
        self.model.generation_config.max_denoising_steps = steps
        probe = WorkerProbe()
        probe.device = self.model.device
        probe.start_peak_memory()
        before = len(self._steps_ms)
        found = self.run(draw_prompts(count, prompt, seed), batch=count, max_tokens=canvas)
        ended = 1000 * time.perf_counter()
        begun = self._steps_ms[before:][:steps]
        return {
            "steps_ms": [b - a for a, b in pairwise([*begun[1:], ended])],
            "seconds": found["seconds"],
            "resident_bytes": resident_bytes(),
            "peak_bytes": probe.peak_memory(),
        }
