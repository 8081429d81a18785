"""The systems of `bench.cpu_sizes`: this project's engine, and transformers, each on all cores."""

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from bench import system
from bench.engine import CanvasEngine
from bench.full_shape_engine import WorkerProbe

OURS, TRANSFORMERS = "vllm-dllm", "transformers"
FIRST_ID, LAST_ID = 10, 2000  # of the drawn prompts; every vocabulary has them


def draw_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


class SizesProbe(WorkerProbe):
    """Knows when a step ended, too: with two steps to a run, there is one to be timed."""

    sample_tokens: Callable[..., Any]  # the worker's
    _ended_ms: float | None = None

    def num_forwards(self) -> int:
        if self._ended_ms is None:
            self._ended_ms = 0.0
            inner = self.sample_tokens

            def timed(*args: Any, **kwargs: Any) -> Any:
                found = inner(*args, **kwargs)
                self._ended_ms = 1000 * time.perf_counter()
                return found

            self.sample_tokens = timed
        return super().num_forwards()

    def last_steps_ms(self, count: int) -> list[float]:
        """Each from its start to that of the next, the last one to its own end."""
        assert self._started_ms is not None and self._ended_ms is not None
        return [b - a for a, b in pairwise([*self._started_ms[-count:], self._ended_ms])]


class SizesEngine(CanvasEngine):
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        return {"run": self.run, "steps": self.steps}

    def steps(self, count: int, prompt: int, canvas: int, steps: int, seed: int) -> dict[str, Any]:
        """`count` requests at once, each of one canvas that takes `steps` steps. Times all but the
        first, which also holds prompts."""
        ask = self.llm.collective_rpc
        ask("num_forwards")
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
            "steps_ms": ask("last_steps_ms", args=(steps - 1,))[0],
            "seconds": found["seconds"],
            "weight_bytes": ask("weight_bytes")[0],
            "peak_bytes": ask("peak_memory")[0],
        }


def start_engine(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    engine = SizesEngine(
        args.checkpoint,
        args.canvas_length,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_seqs * args.canvas_length + 2048,
        worker_extension_cls="bench.cpu_sizes_systems.SizesProbe",
    )
    return {"system": OURS}, engine.handlers()


def start_transformers(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    from bench.transformers_generate import Reference

    class Sizes(Reference):
        def steps(
            self, count: int, prompt: int, canvas: int, steps: int, seed: int
        ) -> dict[str, Any]:
            """As `SizesEngine.steps`; the prompts have a forward of their own."""
            self.model.generation_config.max_denoising_steps = steps
            probe.start_peak_memory()
            before = len(self._steps_ms)
            found = self.run(draw_prompts(count, prompt, seed), batch=count, max_tokens=canvas)
            ended = 1000 * time.perf_counter()
            begun = self._steps_ms[before:][:steps]
            return {
                "steps_ms": [b - a for a, b in pairwise([*begun[1:], ended])],
                "seconds": found["seconds"],
                "weight_bytes": sum(p.nbytes for p in self.model.parameters()),
                "peak_bytes": probe.peak_memory(),
            }

    cores = len(os.sched_getaffinity(0))
    reference = Sizes(args.checkpoint, args.canvas_length, cores, dtype=args.dtype)
    probe = WorkerProbe()
    probe.device = reference.model.device
    handlers = {"run": reference.run, "steps": reference.steps}
    return {"system": TRANSFORMERS, "threads": cores}, handlers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--system", choices=[OURS, TRANSFORMERS], default=OURS)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    args = parser.parse_args()
    start = start_engine if args.system == OURS else start_transformers
    system.serve(lambda: start(args))


if __name__ == "__main__":
    main()
