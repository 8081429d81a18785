"""One engine of `bench.full_shape`, ours or stock vLLM's, and what it measures in its worker."""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import stock_vllm
from bench.dummy_checkpoint import CANVAS
from bench.engine import CanvasEngine

OURS, STOCK = "vllm-dllm", "stock vLLM"
ROUTING, EVEN = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "bench_even"  # see even_routing.py
FIRST_ID, LAST_ID = 10, 10_000  # of drawn prompts
COPIED = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes


class WorkerProbe:
    """vLLM mixes this into its worker (`worker_extension_cls`); called with `collective_rpc`.

    A step is timed from one call of the worker to the next: on a GPU nothing waits for it within a
    step, and the model's own `forward` is not called when a CUDA graph is replayed. The host's time
    of a step is the CPU time of the thread that runs it; plain steps do not wait for the device.
    """

    model_runner: Any  # the worker's
    device: torch.device  # the worker's
    execute_model: Callable[..., Any]  # the worker's
    _started_ms: list[float] | None = None
    _host_ms: list[float]

    def num_forwards(self) -> int:
        """How often the model was asked to run since this was first called."""
        if self._started_ms is None:
            self._started_ms = started = []
            self._host_ms = host = []
            inner = self.execute_model

            def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                if scheduled.total_num_scheduled_tokens:
                    started.append(1000 * time.perf_counter())
                    host.append(1000 * time.thread_time())
                return inner(scheduled, *args, **kwargs)

            self.execute_model = timed
        return len(self._started_ms)

    def steps_ms(self, first: int) -> list[float]:
        """How long each took, from call number `first` on."""
        assert self._started_ms is not None
        return [after - before for before, after in pairwise(self._started_ms[first:])]

    def host_ms(self, first: int) -> list[float]:
        """CPU time of each on the host, from call number `first` on."""
        return [after - before for before, after in pairwise(self._host_ms[first:])]

    def start_trace(self) -> None:
        activity = torch.profiler.ProfilerActivity
        kind = activity.CUDA if self.device.type == "cuda" else activity.CPU
        self._trace = torch.profiler.profile(activities=[kind])
        self._wait()
        self._trace.start()

    def stop_trace(self, path: str) -> None:
        self._wait()
        self._trace.stop()
        self._trace.export_chrome_trace(path)

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
    def __init__(
        self,
        checkpoint: str,
        canvas_length: int,
        eager: bool,  # no compiler, no CUDA graphs
        system: str = OURS,
        is_made_up: bool = False,  # the weights are; experts are routed evenly
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        kv_cache_gib: int = 1,
        **more: Any,  # of vLLM's LLM
    ) -> None:
        options: dict[str, Any] = dict(
            dtype="bfloat16",
            enforce_eager=eager,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_seqs * canvas_length + 2048,
            kv_cache_memory_bytes=kv_cache_gib << 30,
            # The cache's size is given; vLLM only checks that so much is free, beside another
            # engine.
            gpu_memory_utilization=0.25,
            worker_extension_cls="bench.full_shape_engine.WorkerProbe",
        )
        if is_made_up:
            os.environ[ROUTING] = EVEN
            options |= dict(
                load_format="dummy", worker_extension_cls="bench.even_routing.EvenProbe"
            )
        if system == STOCK:
            options |= dict(language_model_only=True)
        if system == STOCK and torch.cuda.is_available():
            os.environ["VLLM_PLUGINS"] = ""  # stock vLLM as it is
        elif system == STOCK:
            self._folder = tempfile.TemporaryDirectory()
            stock_vllm.set_environment(Path(self._folder.name))
        super().__init__(checkpoint, canvas_length, **options | more)

    def machine(self) -> dict[str, float]:
        """What the floor of a step's time depends on."""
        ask = self.llm.collective_rpc
        return {
            "weight_bytes": ask("weight_bytes")[0],
            "copy_bytes_per_second": ask("copy_bandwidth")[0],
        }

    def measure(self, concurrency: int, context: int, blocks: int, seed: int) -> dict[str, Any]:
        """Runs `concurrency` requests at once, each of `blocks` canvases after `context` tokens."""
        draw = random.Random(seed)
        prompts = [
            [draw.randrange(FIRST_ID, LAST_ID) for _ in range(context)] for _ in range(concurrency)
        ]
        ask = self.llm.collective_rpc
        first = ask("num_forwards")[0]
        ask("start_peak_memory")
        run = self.run(
            prompts,
            batch=concurrency,
            max_tokens=blocks * CANVAS,
            ignore_eos=True,
            detokenize=False,
        )
        steps_ms = ask("steps_ms", args=(first,))[0]
        return {
            "ms_per_step": statistics.median(steps_ms),
            "steps_ms": [round(ms, 3) for ms in steps_ms],
            "host_ms_per_step": statistics.median(ask("host_ms", args=(first,))[0]),
            "first_token_ms": 1000 * statistics.median(run["first_token_seconds"]),
            "tokens_per_second": sum(map(len, run["outputs"])) / run["seconds"],
            "steps_per_block": run["steps_per_block"],
            "shortest": min(map(len, run["outputs"])),
            "peak_bytes": ask("peak_memory")[0],
            "experts_read": ask("experts_read", args=(concurrency * CANVAS,))[0],
        }

    def trace(self, path: str, **cell: int) -> dict[str, Any]:
        """The same, with a kernel timeline in the file `path`."""
        self.llm.collective_rpc("start_trace")
        found = self.measure(**cell)
        self.llm.collective_rpc("stop_trace", args=(path,))
        return found
