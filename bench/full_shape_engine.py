"""One engine of `bench.full_shape`, ours or stock vLLM's, and what it measures in its worker."""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import stock_vllm, system
from bench.dummy_checkpoint import CANVAS
from bench.engine import CanvasEngine

OURS, STOCK = "vllm-dllm", "stock vLLM"
PROMPT = 128  # tokens
BLOCKS = 2  # of a request
COPIED = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes


class WorkerProbe:
    """vLLM mixes this into its worker (`worker_extension_cls`); called with `collective_rpc`.

    A step is timed from one call of the worker to the next: on a GPU nothing waits for it within a
    step, and the model's own `forward` is not called when a CUDA graph is replayed.
    """

    model_runner: Any  # the worker's
    device: torch.device  # the worker's
    execute_model: Callable[..., Any]  # the worker's
    _started_ms: list[float] | None = None

    def num_forwards(self) -> int:
        """How often the model was asked to run since this was first called."""
        if self._started_ms is None:
            self._started_ms = started = []
            inner = self.execute_model

            def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                if scheduled.total_num_scheduled_tokens:
                    started.append(1000 * time.perf_counter())
                return inner(scheduled, *args, **kwargs)

            self.execute_model = timed
        return len(self._started_ms)

    def steps_ms(self, first: int) -> list[float]:
        """How long each took, from call number `first` on."""
        assert self._started_ms is not None
        return [after - before for before, after in pairwise(self._started_ms[first:])]

    def weight_bytes(self) -> int:
        """Of the text model: what a step of full canvases reads once, all experts included."""
        parameters = self.model_runner.model.named_parameters()
        return sum(p.nbytes for name, p in parameters if "vision" not in name)

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of the best of ten copies of a large tensor."""
        source = torch.zeros(COPIED[self.device.type], dtype=torch.uint8, device=self.device)
        target, seconds = torch.empty_like(source), []
        for _ in range(10):
            self._wait()
            started = time.perf_counter()
            target.copy_(source)
            self._wait()
            seconds.append(time.perf_counter() - started)
        return 2 * source.nbytes / min(seconds)

    def start_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak, proc(5)

    def peak_memory(self) -> int:
        """Bytes that tensors took on a GPU, or the worker process altogether on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class FullShapeEngine(CanvasEngine):
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        return {"run": self.run, "machine": self.machine, "measure": self.measure}

    def machine(self) -> dict[str, float]:
        """What the floor of a step's time depends on."""
        ask = self.llm.collective_rpc
        return {
            "weight_bytes": ask("weight_bytes")[0],
            "copy_bytes_per_second": ask("copy_bandwidth")[0],
        }

    def measure(self, concurrency: int, seed: int) -> dict[str, float]:
        """Runs `concurrency` requests at once, each of BLOCKS canvases after PROMPT tokens."""
        draw = random.Random(seed)
        prompts = [[draw.randrange(10, 10_000) for _ in range(PROMPT)] for _ in range(concurrency)]
        ask = self.llm.collective_rpc
        first = ask("num_forwards")[0]
        ask("start_peak_memory")
        run = self.run(
            prompts,
            batch=concurrency,
            max_tokens=BLOCKS * CANVAS,
            ignore_eos=True,
            detokenize=False,
        )
        return {
            "ms_per_step": statistics.median(ask("steps_ms", args=(first,))[0]),
            "tokens_per_second": sum(map(len, run["outputs"])) / run["seconds"],
            "steps_per_block": run["steps_per_block"],
            "shortest": min(map(len, run["outputs"])),
            "peak_bytes": ask("peak_memory")[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    parser.add_argument("--system", choices=[OURS, STOCK], default=OURS)
    parser.add_argument("--dummy", action="store_true", help="make the weights up")
    parser.add_argument("--eager", action="store_true", help="no compiler, no CUDA graphs")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=int, default=1)
    args = parser.parse_args()
    options: dict[str, Any] = dict(
        dtype="bfloat16",
        enforce_eager=args.eager,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_seqs * args.canvas_length + 2048,
        kv_cache_memory_bytes=args.kv_cache_gib << 30,
        worker_extension_cls="bench.full_shape_engine.WorkerProbe",
    )
    if args.dummy:
        options |= dict(load_format="dummy")
    if args.system == STOCK:
        options |= dict(language_model_only=True)

    def start() -> tuple[dict[str, Any], Any]:
        engine = FullShapeEngine(args.checkpoint, args.canvas_length, **options)
        return {"system": args.system}, engine.handlers()

    with tempfile.TemporaryDirectory() as folder:
        if args.system == STOCK and torch.cuda.is_available():
            os.environ["VLLM_PLUGINS"] = ""  # stock vLLM as it is
        elif args.system == STOCK:
            stock_vllm.set_environment(Path(folder))
        system.serve(start)


if __name__ == "__main__":
    main()
